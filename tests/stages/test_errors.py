"""Whatever a user gets wrong ends in one line that says what it was, at once."""

import gzip
import re
import shutil

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.data.rows import SMALL_FILE
from helpers.step1 import deepspeed, parsed, python, run, write_adapter_config, write_jsonl

MAX_SECONDS = 5.0
LARGE_FILE_ROWS = SMALL_FILE // 1000


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A current directory with files that are wrong."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "truncated.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:20])
    (tmp_path / "truncated.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "typo.yaml").write_text("lora_dm: 8\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("binary.jsonl", "binary.jsonl:1.*UTF-8"),
        ("deep.jsonl", "deep.jsonl:1"),
        ("truncated.jsonl.gz", "truncated.jsonl.gz.*cannot be read"),
    ],
)
def test_file_that_holds_no_text_is_named(refused, file, words):
    assert re.search(words, refused("--data_path", file))


@pytest.mark.parametrize("option", ["--output_dir", "--model_name_or_path", "--data_path"])
def test_endless_path_is_one_line_too(refused, option):
    assert "too long" in refused(option, "x" * 5000)


def test_rank_that_no_launcher_set_silences_nothing(refused, monkeypatch):
    monkeypatch.setenv("RANK", "16")
    assert "--lora_dim" in refused("--lora_dm", "8")


def test_hub_names_are_not_looked_up_before_the_run(workplace):
    config = parsed("--model_name_or_path", "org/model", "--data_path", "org/data")
    assert config.data.data_path == ("org/data",)


# ---------------------------------------------------------------------------- whole commands


@pytest.mark.stage
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--lora_dm 8", "did you mean --lora_dim?"),
        ("--data_path truncated.parquet", "truncated.parquet"),
        ("--config typo.yaml", "did you mean --lora_dim?"),
    ],
)
def test_python_command_ends_with_code_2_and_one_line(workplace, line, part):
    done = run(python(*line.split()), workplace)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert part in done.err
    assert done.seconds < MAX_SECONDS


@pytest.mark.thorough
@pytest.mark.stage
def test_under_the_launcher_the_first_rank_alone_says_it(workplace):
    command = deepspeed("--lora_dm", "8", launcher=["--num_gpus", "2"])
    done = run(command, workplace)
    assert done.code == 2
    assert (done.out + done.err).count("did you mean --lora_dim?") == 1
    assert "Traceback" not in done.out + done.err


@pytest.mark.stage
@pytest.mark.parametrize("kind", ["a later bad row", "cut weights of a model", "cut adapter"])
def test_what_shows_only_during_the_run_is_one_line_too(launcher, workplace, kind):
    if kind == "a later bad row":
        # too large a file to be read through before the run
        long = {"prompt": "a" * 1000, "completion": " b"}
        write_jsonl(workplace / "later.jsonl", [long] * LARGE_FILE_ROWS + [{"prompt": "a"}])
        place = f"later.jsonl:{LARGE_FILE_ROWS + 1}"
        argv, parts = ["--data_path", "later.jsonl"], [place, "'completion'"]
    elif kind == "cut weights of a model":
        shutil.copytree(BUNDLED_MODEL, workplace / "base")
        weights = workplace / "base" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
        argv, parts = ["--model_name_or_path", "base"], ["--model_name_or_path", "base"]
    else:
        write_adapter_config(workplace / "adapter", r=4)
        argv, parts = ["--model_name_or_path", "adapter"], ["adapter_model.safetensors"]
    running = launcher.start([*argv, "--output_dir", "out"], workplace)
    assert running.wait() == [2]
    assert "Traceback" not in running.err()
    (line,) = [line for line in running.err().splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in line
    # nothing was learned, so nothing is left in the way of the next try
    assert not (workplace / "out").exists()
