"""Whatever a user gets wrong ends in one line that says what it was, at once."""

import gzip
import shutil

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.addons import installed
from dschat_lora.data.rows import SMALL_FILE
from helpers.step1 import deepspeed, parsed, python, run, write_adapter_config, write_jsonl

MAX_SECONDS = 5.0
LARGE_FILE_ROWS = SMALL_FILE // 1000


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A current directory with something wrong of each kind."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_jsonl(tmp_path / "good.jsonl", [{"prompt": "a", "completion": " b"}])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"')
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "truncated.json").write_text('{"text": ')
    (tmp_path / "truncated.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 999)[:20])
    (tmp_path / "truncated.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "header.csv").write_text("text\n")
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "notes.md").write_text("a")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("a")
    (tmp_path / "code" / "sub").mkdir(parents=True)
    (tmp_path / "code" / "sub" / "main.py").write_text("a")
    (tmp_path / "splits").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "splits" / f"{split}-00000-of-00001.jsonl").write_text('{"text": "a"}')
    for name, row in {
        "columns": {"query": "a", "answer": "b"},
        "label": {"prompt": "a", "completion": "b", "label": True},
        "prompt": {"prompt": "a"},
        "half": {"chosen": "a"},
        "number": {"text": 5},
        "void": {"text": " "},
        "message": {"messages": [{"role": "user"}]},
        "mixed": {"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "b"}]},
    }.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [row])
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "bad.yaml").write_text("lora_dim: [\n")
    (tmp_path / "typo.yaml").write_text("lora_dm: 8\n")
    (tmp_path / "type.yaml").write_text("lora_dim: eight\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "stage3.json").write_text('{"zero_optimization": {"stage": 3}}')
    write_adapter_config(tmp_path / "adapter", r=4)
    write_adapter_config(tmp_path / "orphan", base_model_name_or_path="/nowhere/base")
    write_adapter_config(tmp_path / "dora", use_dora=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "adapter_config.json").write_text('{"peft_type": ')
    (tmp_path / "earlier" / "adapter").mkdir(parents=True)
    return tmp_path


# command line -> what the one line must name: the flag or file, the value, what would do
CASES = [
    ("--lora_dm 8", ["--lora_dm", "did you mean --lora_dim?"]),
    ("--lora-dim 8", ["--lora-dim", "did you mean --lora_dim?"]),
    ("--banana me", ["--banana", "--help"]),
    ("stray", ["'stray'", "--"]),
    ("--lora_dim", ["--lora_dim", "expected one argument"]),
    ("--lora_dim eight", ["--lora_dim", "'eight'", "whole number"]),
    ("--lora_dim -1", ["--lora_dim", "-1", ">= 0"]),
    ("--learning_rate nan", ["--learning_rate", "'nan'", "a number"]),
    ("--learning_rate -1e-4", ["--learning_rate", "-0.0001", "> 0"]),
    ("--dtype fp8", ["--dtype", "'fp8'", "auto, fp32, bf16, fp16"]),
    ("--zero_stage 4", ["--zero_stage", "'4'", "0, 1, 2, 3"]),
    ("--lr_scheduler_type cos", ["--lr_scheduler_type", "'cos'", "linear, cosine"]),
    ("--overlong cut", ["--overlong", "'cut'", "split, drop, truncate, error"]),
    ("--max_seq_len 99999", ["--max_seq_len", "99999", "512 positions"]),
    ("--data_split 2,4", ["--data_split", "'2,4'", "2,4,4"]),
    ("--offload", ["--offload", "--zero_stage 1, 2 or 3"]),
    ("--target_modules q_proj", ["--target_modules", "--lora_dim > 0"]),
    ("--lora_learning_rate 1 --lora_lr_multiplier 2", ["--lora_learning_rate 1", "multiplier 2"]),
    ("--tensor_parallel_size 0", ["--tensor_parallel_size", "0", ">= 1"]),
    ("--lora_dim 4 --tensor_parallel_size 2", ["--tensor_parallel_size 2", "processes, 1", "1 wo"]),
    # models
    ("--model_name_or_path nowhere/at/all", ["--model_name_or_path", "nowhere/at/all", "hub name"]),
    ("--model_name_or_path ./nowhere", ["--model_name_or_path", "./nowhere", "does not exist"]),
    ("--model_name_or_path notes.txt", ["--model_name_or_path", "notes.txt", "is a file"]),
    ("--model_name_or_path folder", ["--model_name_or_path", "folder", "holds notes.txt"]),
    ("--model_name_or_path orphan", ["orphan", "/nowhere/base", "missing"]),
    ("--model_name_or_path dora", ["dora", "use_dora", "not supported"]),
    ("--model_name_or_path cut", ["cut/adapter_config.json", "damaged"]),
    ("--model_name_or_path adapter --lora_dim 8", ["--lora_dim", "8", "4", "--merge_adapter"]),
    # data
    ("--data_path none.jsonl", ["--data_path", "none.jsonl", "does not exist", ".parquet"]),
    ("--data_path ./org/name", ["--data_path", "./org/name", "does not exist"]),
    ("--eval_data_path none.jsonl", ["--eval_data_path", "none.jsonl"]),
    ("--sft_only_data_path none.jsonl", ["--sft_only_data_path", "none.jsonl"]),
    ("--data_path notes.md", ["--data_path", "notes.md", ".jsonl"]),
    ("--data_path code", ["--data_path", "code", "sub", ".jsonl"]),
    ("--data_path splits", ["--data_path", "splits", "dev, test", "splits:dev"]),
    ("--data_path splits --data_split_name x", ["--data_path", "splits", "'x'", "dev, test"]),
    ("--data_path good.jsonl --data_split_name x", ["--data_split_name x", "good.jsonl", "a file"]),
    ("--data_path *.parq", ["--data_path", "*.parq", "matches no data file"]),
    ("--data_path empty.jsonl", ["--data_path", "empty.jsonl", "no rows"]),
    ("--data_path blank.jsonl", ["--data_path", "blank.jsonl", "no rows"]),
    ("--data_path header.csv", ["--data_path", "header.csv", "no rows"]),
    ("--data_path broken.jsonl", ["broken.jsonl:1", "not valid JSON"]),
    ("--data_path deep.jsonl", ["deep.jsonl:1"]),
    ("--data_path binary.jsonl", ["binary.jsonl:1", "UTF-8"]),
    ("--data_path truncated.json", ["truncated.json:1", "not valid JSON"]),
    ("--data_path truncated.jsonl.gz", ["truncated.jsonl.gz", "cannot be read"]),
    ("--data_path truncated.parquet", ["truncated.parquet", "cannot be read"]),
    ("--data_path list.jsonl", ["list.jsonl:1", "not a JSON object"]),
    ("--data_path columns.jsonl", ["columns.jsonl:1", "'answer'", "`completion`"]),
    ("--data_path columns.jsonl --columns promt=query", ["--columns", "did you mean prompt?"]),
    ("--data_path columns.jsonl --columns prompt=q", ["columns.jsonl:1", "--columns prompt=q"]),
    ("--data_path label.jsonl", ["label.jsonl:1", "`label`", "--unpaired_rows good_only"]),
    ("--data_path label.jsonl --unpaired_rows good", ["--unpaired_rows", "refuse, good_only, all"]),
    ("--data_path prompt.jsonl", ["prompt.jsonl:1", "'completion'"]),
    ("--data_path half.jsonl", ["half.jsonl:1", "'rejected'"]),
    ("--data_path number.jsonl", ["number.jsonl:1", "`text`", "int"]),
    ("--data_path void.jsonl", ["void.jsonl:1", "`text` is empty"]),
    ("--data_path message.jsonl", ["message.jsonl:1", "'content'"]),
    ("--data_path mixed.jsonl", ["mixed.jsonl:1", "all texts or all message lists"]),
    ("--data_path good.jsonl --data_weights 1 2", ["--data_weights", "1 --data_path"]),
    # files of options
    ("--config none.yaml", ["--config", "none.yaml"]),
    ("--config bad.yaml", ["--config", "bad.yaml", "line 2"]),
    ("--config typo.yaml", ["typo.yaml", "--lora_dm", "did you mean --lora_dim?"]),
    ("--config type.yaml", ["type.yaml", "lora_dim", "'eight'", "whole number"]),
    ("--deepspeed_config none.json", ["--deepspeed_config", "none.json"]),
    ("--deepspeed_config bad.json", ["--deepspeed_config", "bad.json", "line 1"]),
    (
        "--deepspeed_config stage3.json --zero_stage 2",
        ["stage3.json", "zero_optimization.stage", "3", "--zero_stage", "2"],
    ),
    # where it goes
    ("--output_dir notes.txt", ["--output_dir", "notes.txt", "not a directory"]),
    ("--output_dir earlier", ["--output_dir", "earlier", "--overwrite_output_dir"]),
]
if "trackers" in installed():
    CASES += [
        ("--wandb_entity me", ["--wandb_entity", "--report_to wandb"]),
        ("--report_to mlflow", ["--report_to", "'mlflow'", "none, tensorboard, wandb, trackio"]),
        ("--report_to none wandb", ["--report_to none wandb", "alone"]),
    ]


@pytest.mark.parametrize(("line", "parts"), CASES, ids=[line for line, _ in CASES])
def test_mistake_is_one_line_that_says_what_it_was(refused, line, parts):
    message = refused(*line.split())
    missing = [part for part in parts if part not in message]
    assert not missing, message


@pytest.mark.parametrize("option", ["--output_dir", "--model_name_or_path", "--data_path"])
def test_endless_path_is_one_line_too(refused, option):
    assert "too long" in refused(option, "x" * 5000)


def test_rank_that_no_launcher_set_silences_nothing(refused, monkeypatch):
    monkeypatch.setenv("RANK", "16")
    assert "--lora_dim" in refused("--lora_dm", "8")


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "word"), ("WORLD_SIZE", "0"), ("RANK", "16"), ("MASTER_PORT", "-1")],
)
def test_number_that_no_launcher_sets_is_named(refused, monkeypatch, name, value):
    for each, number in {"WORLD_SIZE": "1", name: value}.items():
        monkeypatch.setenv(each, number)
    message = refused()
    assert message.startswith(f"the environment variable {name} must be a whole number from ")
    assert message.endswith("without WORLD_SIZE one process runs")
    assert repr(value) in message


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
        argv, parts = ["--model_name_or_path", "adapter"], ["adapter_model.safetensors"]
    running = launcher.start([*argv, "--output_dir", "out"], workplace)
    assert running.wait() == [2]
    assert "Traceback" not in running.err()
    (line,) = [line for line in running.err().splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in line
    # nothing was learned, so nothing is left in the way of the next try
    assert not (workplace / "out").exists()
