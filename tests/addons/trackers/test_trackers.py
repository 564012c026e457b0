"""Trackers hold the numbers of metrics.jsonl, by what their own libraries read back."""

import importlib.util
import json
import math
import sqlite3

import pytest

import dschat_lora as dl
from dschat_lora.addons.trackers.options import TrackerOptions
from dschat_lora.addons.trackers.trackers import RunTracker, TensorBoard
from dschat_lora.report.log import RunLog
from dschat_lora.supervised.validation import check_supervised
from helpers.step1 import parsed

TRAIN = {"loss": 1.5, "mfu": None, "skipped": False, "tokens": 12, "note": "x"}


def library(name):
    return pytest.mark.skipif(
        (spec := importlib.util.find_spec(name)) is None or spec.origin is None,
        reason=f"{name} is not installed: pip install 'dschat_lora[{name}]'",
    )


def lines_of(directory):
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def expected(directory):
    """{name: [(step, value), ...]} of the numbers in metrics.jsonl, times left out."""
    numbers = {}
    for line in lines_of(directory):
        kind, step = line.pop("kind"), line.pop("step")
        line.pop("time")
        if kind == "event":
            continue
        for name, value in line.items():
            if value is not None and not isinstance(value, str):
                numbers.setdefault(f"{kind}/{name}", []).append((step, float(value)))
    return numbers


def write(directory, trackers, steps, *, earlier=None):
    """A log with a train line for each step, an evaluation and an event; perhaps one that goes on.

    ``earlier`` is the number of lines and the step to go on after.
    """
    with RunLog(directory, active=True, sinks=trackers, earlier=earlier is not None) as log:
        if earlier is not None:
            log.rewind(num_lines=earlier[0], seconds=0.0, step=earlier[1])
        for step in steps:
            log.write("train", step, TRAIN | {"loss": 2.0 / step})
        log.write("eval", steps[-1], {"perplexity": 4.0 + steps[-1]})
        log.write("event", steps[-1], {"event": "x", "code": 1})


def scalars(directory):
    """{name: [(step, value), ...]} of what TensorBoard reads in a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory))
    board.Reload()
    names = board.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in board.Scalars(name)] for name in names}


def tracker(name, directory):
    return TrackerOptions((name,)).sinks(directory, {"lora_dim": 4})


# ---------------------------------------------------------------------------- what is passed on


def test_trackers_are_those_asked_for_in_their_order(tmp_path):
    options = TrackerOptions(("tensorboard", "wandb"), tensorboard_path="elsewhere")
    made = options.sinks(tmp_path, {})
    assert [type(each) for each in made] == [TensorBoard, RunTracker]
    assert str(made[0].directory) == "elsewhere"
    assert TrackerOptions().sinks(tmp_path, {}) == []


class Recorder:
    """A tracker's run that keeps what it is given, or fails."""

    def __init__(self, fails=False):
        self.logged, self.fails, self.finished = [], fails, False

    def log(self, numbers, step=None):
        if self.fails:
            raise RuntimeError("no network")
        self.logged.append((step, numbers))

    def finish(self):
        self.finished = True


@pytest.fixture
def start(monkeypatch):
    """Runs of trackio in place of the library's, each with the name it was begun by."""
    begun = []

    def call(identity, directory, config):
        begun.append((identity, config, Recorder()))
        return begun[-1][2]

    monkeypatch.setattr("dschat_lora.addons.trackers.trackers._start_trackio", call)
    return begun


def test_other_ranks_begin_no_run(tmp_path, start):
    with RunLog(tmp_path, active=False, sinks=tracker("trackio", tmp_path)) as log:
        log.rewind(num_lines=0, seconds=0.0, step=0)
        log.write("train", 1, TRAIN)
    assert start == []
    assert list(tmp_path.iterdir()) == []


def test_resumed_run_goes_on_in_the_run_of_the_tracker(tmp_path, start):
    write(tmp_path, tracker("trackio", tmp_path), [1, 2])
    write(tmp_path, tracker("trackio", tmp_path), [3], earlier=(2, 2))
    (first, config, run), (second, _, again) = start
    assert first == second
    assert config == {"lora_dim": 4}
    assert [step for step, _ in run.logged] == [1, 2, 2]
    assert [step for step, _ in again.logged] == [3, 3]
    assert run.finished
    assert again.finished


def test_tracker_that_the_earlier_run_had_not_gets_its_lines_too(tmp_path, start):
    write(tmp_path, (), [1, 2])
    write(tmp_path, tracker("trackio", tmp_path), [3], earlier=(2, 2))
    ((_, _, run),) = start
    assert [step for step, _ in run.logged] == [1, 2, 3, 3]


def test_overwritten_run_is_another_run_of_the_tracker(tmp_path, start):
    for _ in range(2):
        write(tmp_path, tracker("trackio", tmp_path), [1])
    assert start[0][0] != start[1][0]


def test_error_of_a_tracker_is_said_once_and_training_goes_on(tmp_path, start, capsys):
    with RunLog(tmp_path, active=True, sinks=tracker("trackio", tmp_path)) as log:
        start[0][2].fails = True
        log.write("train", 1, TRAIN)
        log.write("train", 2, TRAIN)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2]
    assert capsys.readouterr().err.count("--report_to trackio failed and was turned off") == 1


def test_tracker_that_cannot_begin_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no API key\n configured")

    monkeypatch.setattr("dschat_lora.addons.trackers.trackers._start_wandb", fail)
    words = r"--report_to wandb cannot start a run: no API key configured; WANDB_MODE=offline"
    with pytest.raises(ValueError, match=words):
        RunLog(tmp_path, active=True, sinks=tracker("wandb", tmp_path))


# ---------------------------------------------------------------------------- options


def asked(*argv):
    """The options as a run has them."""
    config = parsed(*argv)
    return config.addons.trackers.check(config).addons.trackers


@pytest.mark.smoke
def test_trackers_may_be_named_several_and_in_deepspeed_chats_way(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(
        name, None, origin="there"
    ))  # fmt: skip
    for argv, names in (
        ("--report_to wandb trackio --enable_tensorboard", "wandb trackio tensorboard"),
        ("--report_to none", "none"),
        ("", "none"),
        ("--report_to wandb wandb", "wandb"),
        *((line, "tensorboard") for line in ("--enable_tensorboard", "--tensorboard_path tb")),
    ):
        trackers = asked(*argv.split())
        assert trackers.report_to == tuple(names.split()), argv
        assert trackers.enable_tensorboard == ("tensorboard" in names)


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
@pytest.mark.parametrize("spec", [None, importlib.machinery.ModuleSpec("wandb", None)])
def test_absent_library_is_one_line_that_names_the_extra(name, spec, monkeypatch):
    """A directory ``wandb`` in the working directory is no library."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        ValueError,
        match=rf"--report_to {name} needs a package: pip install 'dschat_lora\[{name}\]'",
    ):
        asked("--report_to", name)
    with pytest.raises(ValueError, match="--enable_tensorboard needs a package"):
        asked("--enable_tensorboard")


# ---------------------------------------------------------------------------- real libraries


@library("tensorboard")
def test_tensorboard_reads_back_what_metrics_jsonl_holds(tmp_path):
    write(tmp_path, tracker("tensorboard", tmp_path), [1, 2])
    assert scalars(tmp_path / "tensorboard") == expected(tmp_path)


@library("tensorboard")
def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path):
    board_directory = tmp_path / "tb"
    with RunLog(tmp_path, active=True, sinks=[TensorBoard(board_directory)]) as log:
        for step in (1, 2, 3):
            log.write("train", step, {"loss": 1.0})
        log.sync()
    with RunLog(tmp_path, active=True, sinks=[TensorBoard(board_directory)], earlier=True) as log:
        log.rewind(num_lines=2, seconds=0.0, step=2)
        log.write("train", 3, {"loss": 2.0})
    assert scalars(board_directory)["train/loss"] == [(1, 1.0), (2, 1.0), (3, 2.0)]


@library("tensorboard")
def test_tensorboard_of_a_run_that_goes_on_elsewhere_shows_all_its_steps(tmp_path):
    for name in ("source", "fork"):
        (tmp_path / name).mkdir()
    with RunLog(tmp_path / "source", active=True) as log:
        for step in (1, 2, 3):
            log.write("train", step, {"loss": float(step)})
    with RunLog(tmp_path / "fork", active=True, sinks=[TensorBoard(tmp_path / "tb")]) as log:
        source = tmp_path / "source" / "metrics.jsonl"
        log.rewind(num_lines=2, seconds=0.0, step=2, source=source)
        log.write("train", 3, {"loss": 7.0})
    assert scalars(tmp_path / "tb")["train/loss"] == [(1, 1.0), (2, 2.0), (3, 7.0)]


def wandb_records(data):
    """Records in the bytes of a wandb file: a LevelDB log in blocks of 32 KiB, from byte 7 on."""
    from wandb.proto import wandb_internal_pb2

    start, parts = 7, b""
    while start + 7 <= len(data):
        if (room := 32768 - start % 32768) < 7:
            start += room
            continue
        length, kind = int.from_bytes(data[start + 4 : start + 6], "little"), data[start + 6]
        parts += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@library("wandb")
def test_wandb_reads_back_what_metrics_jsonl_holds(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, tracker("wandb", tmp_path), [1, 2])
    write(tmp_path, tracker("wandb", tmp_path), [3], earlier=(lines := 4, 2))
    assert len(lines_of(tmp_path)) == lines + 3
    wandb.teardown()  # its process has then written all
    tracked, identities = {}, set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                identities.add(record.run.run_id)
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                if name.startswith(("train/", "eval/")):
                    tracked.setdefault(name, []).append((row["step"], float(value)))
    assert tracked == expected(tmp_path)
    assert len(identities) == 1


@library("trackio")
def test_trackio_reads_back_what_metrics_jsonl_holds(tmp_path, monkeypatch):
    import trackio.sqlite_storage
    import trackio.utils

    home = tmp_path / "trackio"
    for module in (trackio, trackio.utils, trackio.sqlite_storage):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", home)
    monkeypatch.setenv("TRACKIO_DIR", str(home))
    run = tmp_path / "run"
    run.mkdir()
    write(run, tracker("trackio", run), [1, 2])
    write(run, tracker("trackio", run), [3], earlier=(4, 2))
    (path,) = home.glob("*.db")
    rows = sqlite3.connect(path).execute("select run_name, step, metrics from metrics order by id")
    tracked, names = {}, set()
    for name, step, metrics in rows:
        names.add(name)
        for key, value in json.loads(metrics).items():
            tracked.setdefault(key, []).append((step, float(value)))
    assert tracked == expected(run)
    assert len(names) == 1


def test_numbers_that_are_not_finite_reach_trackers_as_numbers(tmp_path, start):
    with RunLog(tmp_path, active=True, sinks=tracker("trackio", tmp_path)) as log:
        log.write("train", 1, {"loss": math.nan})
    assert math.isnan(start[0][2].logged[0][1]["train/loss"])


@library("tensorboard")
def test_a_run_that_is_stopped_and_goes_on_has_each_step_once(tmp_path):
    def stop(event, step, metrics):
        return "stop" if (event, step) == ("train", 2) else None

    for more in ({"callbacks": [stop], "enable_tensorboard": True}, {"resume": "latest"}):
        run = dl.sft(
            output_dir=tmp_path / "out", max_steps=3, lora_dim=2, eval_iters=1,
            sample_generations=0, quiet=True, **more,
        )  # fmt: skip
        assert run.record["config"]["report_to"] == ["tensorboard"]
    shown = scalars(tmp_path / "out" / "tensorboard")["train/loss"]
    assert [step for step, _ in shown] == [1, 2, 3]
    written = [line["loss"] for line in run.metrics if line["kind"] == "train"]
    assert [value for _, value in shown] == pytest.approx(written, rel=1e-6)
    typed = parsed(
        *("--output_dir", tmp_path / "out", "--resume_from_checkpoint", "latest"),
        *("--report_to", "none"),
    )
    assert check_supervised(typed).addons.trackers == TrackerOptions()
