"""Step 1 that is stopped and goes on: as if it had never stopped."""

import json
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.checkpoint.adapter_config import accept_adapter
from helpers.launcher import THREADS_LEFT
from helpers.spread import ALL
from helpers.step1 import metrics

pytestmark = pytest.mark.stage

STEPS = 24
# Dropout draws numbers at every step; evaluations and checkpoints come between.
RUN = f"""
    --data_path {BUNDLED_DATA["eval"]} --lora_dim 4 --lora_dropout 0.1
    --lora_learning_rate 5e-3 --max_steps {STEPS}
    --per_device_train_batch_size 4 --max_seq_len 64 --eval_interval 5 --eval_iters 2
    --sample_generations 1 --save_interval 8 --save_total_limit 0
    --output_dir out
""".split()
TIMES = re.compile(r"time|step_seconds|.*_per_second|(hardware_)?tflops.*|mfu|peak_memory_bytes")
RESUME = ["--output_dir", "out", "--resume_from_checkpoint"]


@pytest.fixture(scope="module")
def command(launcher):
    """``command(home, *argv)``: how it ended."""

    def call(home, *argv, ranks=1):
        running = launcher.start(argv, home, ranks=ranks)
        codes = running.wait()
        return SimpleNamespace(codes=codes, out=running.out(), err=running.err())

    return call


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The directory of a run that nobody stopped."""
    home = tmp_path_factory.mktemp("whole")
    ended = command(home, *RUN)
    assert ended.codes == [0], ended.err
    return home / "out"


def stop(launcher, home, number, *argv, ranks=1, rank=0, after=2):
    """Start, signal one rank when so many steps are recorded, and wait."""
    running = launcher.start([*RUN, *argv], home, ranks=ranks)
    wait_for_steps(running, home / "out", after)
    running.signal(number, rank)
    codes = running.wait()
    return SimpleNamespace(codes=codes, out=running.out(), err=running.output(ranks - 1))


def wait_for_steps(running, out, count, timeout=180):
    deadline = time.monotonic() + timeout
    log = out / "metrics.jsonl"
    while not log.exists() or log.read_text().count('"kind": "train"') < count:
        assert None in running.codes(), running.output()
        assert time.monotonic() < deadline, running.output()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def stopped(launcher, tmp_path_factory):
    """``stopped(signal)``: (directory, how it ended) of a run that received it."""
    done = {}

    def by(number):
        if number not in done:
            home = tmp_path_factory.mktemp(f"by{number}")
            done[number] = (home / "out", stop(launcher, home, number))
        return done[number]

    return by


@pytest.fixture
def copy_of(tmp_path):
    """``copy_of(directory)``: as ``out`` in a directory of its own, with the same times."""

    def copy(directory):
        shutil.copytree(directory, tmp_path / "out", symlinks=True)
        return tmp_path / "out"

    return copy


def lines_of(out):
    """``metrics.jsonl`` without what depends on time."""
    lines = metrics(out)
    return [{k: v for k, v in line.items() if not TIMES.fullmatch(k)} for line in lines]


def last_step(out):
    return metrics(out, "train")[-1]["step"]


def record(out):
    return json.loads((out / "run.json").read_text())


def names(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def files_of(out):
    """Every file's bytes, the lock aside."""
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


def state_of(checkpoint):
    """What a checkpoint says but for times and options."""
    state = json.loads((checkpoint / "state.json").read_text())
    return {
        **{name: state[name] for name in ("step", "identity", "engines", "parts")},
        "lines": state["log"]["num_lines"],
    }


def assert_same_run(found, expected, *, steps=STEPS):
    """The same losses and evaluations, the same last state and the same result."""
    assert lines_of(found) == lines_of(expected)
    name = f"checkpoints/step-{steps:08d}"
    assert state_of(found / name) == state_of(expected / name)
    for path in (f"{name}/model-00001.safetensors", "adapter/adapter_model.safetensors"):
        assert (found / path).read_bytes() == (expected / path).read_bytes(), path
    assert record(found)["results"] == record(expected)["results"]
    assert record(found).get("answers") == record(expected).get("answers")
    assert record(found)["status"] == "finished"


# ---------------------------------------------------------------------------- stopped


def test_run_that_nobody_stopped_keeps_checkpoints_on_the_way_and_last(whole):
    assert names(whole) == ["step-00000008", "step-00000016", "step-00000024"]
    assert record(whole)["checkpoints"]["saved"] == 3
    assert record(whole)["checkpoints"]["seconds_in_training"] > 0
    assert "resumed" not in record(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), *[(signal.SIGINT, 130)] * ALL])
def test_stopped_run_is_saved_says_so_in_one_line_and_goes_on_as_if_never_stopped(
    command, stopped, whole, copy_of, number, code
):
    out, ended = stopped(number)
    assert ended.codes == [code]
    assert "Traceback" not in ended.err
    step = last_step(out)
    assert 2 <= step < STEPS
    name, last = signal.Signals(number).name, ended.out.splitlines()[-1]
    said, _, how = last.partition("; resume with: python ")
    assert said == f"stopped by {name} after step {step}"
    assert how.endswith("/main.py --output_dir out --resume_from_checkpoint latest")
    assert record(out)["status"] == f"interrupted by {name} at step {step}"
    assert f"step-{step:08d}" in names(out)
    assert not (out / "adapter").exists()

    out = copy_of(out)
    ended = command(out.parent, *RESUME, "latest")
    assert ended.codes == [0], ended.err
    assert f"resuming from out/checkpoints/step-{step:08d}, after step {step}" in ended.out
    assert_same_run(out, whole)
    (resumed,) = record(out)["resumed"]
    assert resumed["step"] == step
    assert resumed["checkpoint"].endswith(f"step-{step:08d}")


def test_older_checkpoint_by_path_sets_later_ones_and_their_lines_aside(command, whole, copy_of):
    out = copy_of(whole)
    path = out / "checkpoints" / "step-00000008"
    ended = command(out.parent, "--resume_from_checkpoint", path)
    assert ended.codes == [0], ended.err
    assert "set aside: " in ended.out
    assert names(out) == [
        *("step-00000008", "step-00000016", "step-00000016.abandoned"),
        *("step-00000024", "step-00000024.abandoned"),
    ]
    assert_same_run(out, whole)


@pytest.mark.thorough
def test_stopped_a_second_time_it_still_is_the_same_run(command, launcher, stopped, whole, copy_of):
    out = copy_of(stopped(signal.SIGTERM)[0])
    first = last_step(out)
    running = launcher.start([*RESUME, "auto"], out.parent)
    wait_for_steps(running, out, first + 2)
    running.signal(signal.SIGTERM)
    assert running.wait() == [143], running.output()
    second = last_step(out)
    assert first + 2 <= second < STEPS
    assert command(out.parent, *RESUME, "auto").codes == [0]
    assert_same_run(out, whole)
    assert [each["step"] for each in record(out)["resumed"]] == [first, second]


def test_damaged_checkpoint_is_passed_over_and_kept_as_rejected(command, whole, copy_of):
    out = copy_of(whole)
    weights = out / "checkpoints" / "step-00000024" / "model-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    ended = command(out.parent, *RESUME, "latest")
    assert ended.codes == [0], ended.err
    assert "checkpoint rejected: out/checkpoints/step-00000024/model-00001.safetensors has" in (
        ended.out
    )
    assert "resuming from out/checkpoints/step-00000016" in ended.out
    assert "step-00000024.rejected" in names(out)
    assert_same_run(out, whole)


# ---------------------------------------------------------------------------- finished


def test_finished_run_that_is_resumed_only_writes_its_result_again(command, whole, copy_of):
    out = copy_of(whole)
    shutil.rmtree(out / "adapter")
    before = files_of(out)
    ended = command(out.parent, *RESUME, "latest")
    assert ended.codes == [0], ended.err
    after = files_of(out)
    for name, content in before.items():
        assert name in ("run.json", "report.html") or after[name] == content, name
    assert not any(name.startswith("checkpoints") for name in after.keys() - before.keys())
    assert_same_run(out, whole)


def test_more_steps_extend_a_finished_run(command, whole, copy_of):
    out = copy_of(whole)
    more = STEPS + 4
    ended = command(out.parent, *RESUME, "latest", "--max_steps", more)
    assert ended.codes == [0], ended.err
    assert f"note         --max_steps {more} from here on, {STEPS} so far" in ended.out
    steps = [line["step"] for line in metrics(out, "train")]
    assert steps == list(range(1, more + 1))
    assert lines_of(out)[: len(lines_of(whole))] == lines_of(whole)
    assert [line["step"] for line in metrics(out, "eval")] == [0, 5, 10, 15, 20, STEPS, 25, more]
    assert names(out)[-1] == f"step-{more:08d}"
    saved, exported = (
        load_file(path)
        for path in (
            out / "checkpoints" / names(out)[-1] / "model-00001.safetensors",
            out / "adapter" / "adapter_model.safetensors",
        )
    )
    weights = [saved[key] for key in saved if key.startswith("weight:")]
    assert sum(float(w.double().sum()) for w in weights) == pytest.approx(
        sum(float(w.double().sum()) for w in exported.values()), rel=1e-6
    )


def test_fewer_steps_than_done_are_refused_and_the_run_stays_as_it_was(command, whole, copy_of):
    out = copy_of(whole)
    before = files_of(out)
    path = out / "checkpoints" / "step-00000016"
    ended = command(out.parent, "--resume_from_checkpoint", path, "--max_steps", 10)
    assert ended.codes == [2]
    assert ended.err.startswith(f"error: --resume_from_checkpoint {path} is after step 16, and ")
    assert "end the run at step 10; raise them, or" in ended.err
    assert ended.err.count("\n") == 1
    assert files_of(out) == before


@pytest.mark.thorough
def test_run_goes_on_in_another_directory_and_leaves_the_first_as_it_was(
    command, stopped, whole, copy_of
):
    out = copy_of(stopped(signal.SIGTERM)[0])
    before = files_of(out)
    ended = command(
        out.parent, "--output_dir", "fork", "--resume_from_checkpoint", "out", "--save_interval", 0
    )
    assert ended.codes == [0], ended.err
    assert files_of(out) == before
    fork = out.parent / "fork"
    assert lines_of(fork) == lines_of(whole)
    assert (fork / "adapter/adapter_model.safetensors").read_bytes() == (
        whole / "adapter/adapter_model.safetensors"
    ).read_bytes()
    assert record(fork)["resumed"][0]["step"] == last_step(out)
    assert set(record(fork)) == set(record(whole)) | {"resumed"}


# ---------------------------------------------------------------------------- refused


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The bundled model with one weight changed."""
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("model") / "other"
    shutil.copytree(BUNDLED_MODEL, directory)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    key = max(tensors, key=lambda name: tensors[name].numel())
    tensors[key].flatten()[0] += 1.0
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def other_data(tmp_path_factory):
    """The bundled rows, the first two in each other's place."""
    lines = Path(BUNDLED_DATA["eval"]).read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path_factory.mktemp("data") / "other.jsonl"
    path.write_text("".join([lines[1], lines[0], *lines[2:]]), encoding="utf-8")
    return path


@pytest.mark.thorough
def test_continued_adapter_of_another_scale_is_refused(command, whole, tmp_path):
    scaled = tmp_path / "scaled"
    shutil.copytree(whole / "adapter", scaled)
    config = scaled / "adapter_config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"lora_alpha": 32', '"lora_alpha": 64'), encoding="utf-8")
    accept_adapter(scaled)
    options = ["--model_name_or_path", whole / "adapter", "--max_steps", 2]
    assert command(tmp_path, *RUN, *options).codes == [0]
    ended = command(tmp_path, *RESUME, "latest", "--model_name_or_path", scaled)
    assert ended.codes == [2]
    assert "the run differs: the adapter (was r 4, alpha 32, now r 4, alpha 64)" in ended.err


def test_dry_run_that_finds_a_mistake_leaves_the_users_files_alone(command, tmp_path):
    (tmp_path / "run.json").write_text("mine", encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    ended = command(tmp_path, *"--lora_dim 4 --target_modules nosuch --dry_run".split())
    assert ended.codes == [2]
    assert ended.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "metrics.jsonl"}


@pytest.mark.thorough
def test_signal_whose_save_fails_says_that_nothing_was_saved(command, launcher, tmp_path):
    running = launcher.start([*RUN, "--save_interval", 0], tmp_path)
    wait_for_steps(running, tmp_path / "out", 2)
    (tmp_path / "out" / "checkpoints").write_text("in the way", encoding="utf-8")
    running.signal(signal.SIGTERM)
    assert running.wait() == [1]
    assert running.err().count("\n") == 1
    assert "stopped by SIGTERM; progress since the last checkpoint is not saved" in (running.err())
    status = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))["status"]
    assert status.startswith("failed: OSError: out/checkpoints")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model", "the run differs: the base model's weights (was "),
        ("data", "the run differs: the training data (was "),
        ("--lora_dim 5", "the run differs: --lora_dim was 4, now 5"),
    ],
)
def test_another_run_is_refused_in_one_line_and_the_earlier_one_stays_as_it_was(
    command, stopped, copy_of, other_model, other_data, change, message
):
    out = copy_of(stopped(signal.SIGTERM)[0])
    options = {
        "model": ["--model_name_or_path", other_model],
        "data": ["--data_path", other_data],
    }.get(change) or change.split()
    before = files_of(out)
    ended = command(out.parent, *RESUME, "latest", *options)
    assert ended.codes == [2]
    assert ended.err.startswith("error: --resume_from_checkpoint ")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert files_of(out) == before


def test_second_process_is_refused_while_the_first_lives(command, launcher, tmp_path):
    first = launcher.start(RUN, tmp_path)
    wait_for_steps(first, tmp_path / "out", 10)
    first.signal(signal.SIGSTOP)
    try:
        # A signal reaches a busy process a little later.
        before = None
        while before != (before := files_of(tmp_path / "out")):
            time.sleep(0.3)
        for options in (["--overwrite_output_dir"], ["--resume_from_checkpoint", "auto"]):
            ended = command(tmp_path, *RUN, *options)
            assert ended.codes == [2]
            assert ended.err == (
                "error: another run is writing to out; wait for it, stop it, or choose another "
                "--output_dir\n"
            )
        after = files_of(tmp_path / "out")
        assert {n: after[n] for n in before if n != "run.json"} == {
            n: before[n] for n in before if n != "run.json"
        }
    finally:
        first.signal(signal.SIGTERM)
        first.signal(signal.SIGCONT)
    assert first.wait() == [143]
    assert command(tmp_path, *RESUME, "latest").codes == [0]


# ---------------------------------------------------------------------------- several processes


def test_signal_to_one_of_two_processes_stops_both_in_order(command, launcher, tmp_path, whole):
    ended = stop(
        launcher,
        tmp_path,
        signal.SIGTERM,
        *("--per_device_train_batch_size", "2", "--lora_dropout", "0", "--zero_stage", "2"),
        ranks=2,
        rank=1,
    )
    out = tmp_path / "out"
    step = last_step(out)
    assert ended.codes == [143, 143], ended.err
    assert "Traceback" not in ended.err
    assert f"stopped by SIGTERM after step {step}; resume with: " in ended.out
    assert names(out)[-1] == f"step-{step:08d}"
    # One process goes on, and each step keeps its rows.
    ended = command(tmp_path, *RESUME, "latest", "--zero_stage", "0")
    assert ended.codes == [0], ended.err
    assert (
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2: a step keeps 4 rows"
        in ended.out
    )
    found, expected = metrics(out, "train"), metrics(whole, "train")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for name in ("samples", "tokens", "supervised_tokens", "learning_rate", "epoch"):
        assert [line[name] for line in found] == [line[name] for line in expected]


@pytest.mark.thorough
def test_signal_in_an_evaluation_cuts_it_short_and_it_is_made_good(command, launcher, tmp_path):
    options = [
        *("--lora_dim", "4", "--lora_learning_rate", "5e-3", "--max_seq_len", "64", "--max_steps"),
        *("6", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "1"),
        *(
            "--eval_interval",
            "3",
            "--eval_iters",
            "30",
            "--sample_generations",
            "0",
            "--output_dir",
            "out",
        ),
    ]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    assert command(tmp_path / "whole", *options, ranks=2).codes == [0, 0]
    running = launcher.start(options, tmp_path / "cut", ranks=2, script=THREADS_LEFT)
    out = tmp_path / "cut" / "out"
    wait_for_steps(running, out, 3)  # thirty batches are evaluated after the third
    running.signal(signal.SIGTERM, 1)
    assert running.wait() == [143, 143], running.output()
    assert [running.out(rank).splitlines()[-1] for rank in range(2)] == ["[]", "[]"]
    assert [line["step"] for line in metrics(out, "eval")] == [0]
    assert names(out) == ["step-00000003"]
    ended = command(tmp_path / "cut", *RESUME, "latest", ranks=2)
    assert ended.codes == [0, 0], ended.err
    assert_same_run(out, tmp_path / "whole" / "out", steps=6)
