"""metrics.jsonl is valid however a run ends; one rank alone speaks."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dschat_lora.report import log as log_module
from dschat_lora.report.log import (
    RunLog,
    eval_line,
    jsonable,
    summary_lines,
    train_line,
)
from dschat_lora.report.terminal import shown_by

ROOT = Path(__file__).resolve().parents[2]
TRAIN = {
    "loss": 1.25,
    "learning_rate": 1e-3,
    "lora_learning_rate": 5e-4,
    "grad_norm": 0.5,
    "step_seconds": 2.0,
    "tokens_per_second": 1234.5,
    "tflops_per_device": 0.25,
    "mfu": None,
}


def strict(line):
    """The object in a line; NaN and Infinity, which JSON lacks, are errors."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines_of(directory):
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


class Recorder:
    """Keeps what a log's sink is told."""

    def __init__(self):
        self.told = []

    def begin(self, lines, *, first):
        self.told.append(("begin", len(lines), first))

    def add(self, step, numbers):
        self.told.append((step, dict(numbers)))

    def flush(self):
        self.told.append("flush")

    def close(self):
        self.told.append("close")


def test_each_record_is_one_line_with_kind_step_and_time(tmp_path):
    with RunLog(tmp_path, active=True) as log:
        log.write("eval", 0, {"loss": 1.0})
        log.write("train", 1, {"loss": 0.5, "mfu": None})
    first, second = lines_of(tmp_path)
    assert (first["kind"], first["step"], first["loss"]) == ("eval", 0, 1.0)
    assert (second["kind"], second["step"], second["mfu"]) == ("train", 1, None)
    assert 0 <= first["time"] <= second["time"] < 60


def test_numbers_that_are_not_finite_are_strings(tmp_path):
    fields = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": [math.nan, {"e": math.inf}]}
    with RunLog(tmp_path, active=True) as log:
        log.write("train", 1, fields)
    (line,) = lines_of(tmp_path)
    assert [line[name] for name in "abc"] == ["nan", "inf", "-inf"]
    assert line["d"] == ["nan", {"e": "inf"}]


def test_other_values_stay_as_they_are():
    value = {"a": 1, "b": 1.5, "c": True, "d": None, "e": "nan", "f": (1, 2), 3: "key"}
    assert jsonable(value) == {
        "a": 1, "b": 1.5, "c": True, "d": None, "e": "nan", "f": [1, 2], "3": "key"
    }  # fmt: skip


def test_log_starts_empty_unless_an_earlier_one_is_gone_on_with(tmp_path):
    for step in (1, 2, 3):
        with RunLog(tmp_path, active=True, earlier=step == 3) as log:
            if step == 3:
                log.rewind(num_lines=1, seconds=0.0, step=2)
            log.write("train", step, {})
    assert [line["step"] for line in lines_of(tmp_path)] == [2, 3]


def test_process_that_is_killed_leaves_whole_lines(tmp_path):
    code = (
        "import os, sys, pathlib; from dschat_lora.report.log import RunLog\n"
        f"log = RunLog(pathlib.Path({str(tmp_path)!r}), active=True)\n"
        "[log.write('train', step, {'loss': float('nan')}) for step in range(1, 51)]\n"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert ended.returncode == -9
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, 51))


def test_error_inside_a_run_closes_the_log_and_goes_on(tmp_path):
    def fail_after_a_line():
        with RunLog(tmp_path, active=True) as log:
            log.write("train", 1, {})
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_after_a_line()
    assert len(lines_of(tmp_path)) == 1


def test_other_ranks_write_and_say_nothing(tmp_path, capsys):
    with RunLog(tmp_path, active=False, sinks=[sink := Recorder()]) as log:
        log.expect(10)
        log.write("train", 1, {"loss": 1.0})
        log.say("hello")
    assert (list(tmp_path.iterdir()), sink.told) == ([], [])
    assert capsys.readouterr() == ("", "")


def test_lines_for_a_person_are_not_wrapped_in_a_pipe(tmp_path, capsys):
    text = "  note         " + "word " * 30
    with RunLog(tmp_path, active=True) as log:
        log.say(text)
    assert capsys.readouterr() == (text + "\n", "")


def test_a_steps_line_shows_what_a_person_watches_and_more_if_asked():
    assert train_line(3, 120, TRAIN, left=234.4) == (
        "step   3/120  loss 1.2500  lr 1.00e-03  LoRA 5.00e-04  1,234 tok/s  0:03:54 left"
    )
    assert train_line(3, 120, TRAIN | {"mfu": 0.123}, left=234.4, verbose=True) == (
        "step   3/120  loss 1.2500  lr 1.00e-03  LoRA 5.00e-04  grad 0.5  2.00 s  0.25 TFLOPs  "
        "MFU 12.3%  1,234 tok/s  0:03:54 left"
    )
    for rate in (None, 1e-3):
        line = train_line(1, 1, TRAIN | {"lora_learning_rate": rate}, left=0)
        assert "  lr 1.00e-03  1,234 tok/s" in line
    unknown = {"step_seconds": None, "tokens_per_second": None, "tflops_per_device": None}
    assert "nan s  0 TFLOPs" in train_line(1, 1, TRAIN | unknown, left=0, verbose=True)


def test_lines_of_long_runs_fit_80_columns():
    pairs = TRAIN | {"accuracy": 1.0, "tokens_per_second": 123456.0}
    assert train_line(9876, 10000, pairs, left=86400) == (
        "step  9876/10000 loss 1.2500 acc 100.0% lr 5.00e-04 123,456 tok/s 24:00:00 left"
    )


def test_time_left_is_by_the_steps_of_this_process(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    with RunLog(tmp_path, active=True) as log:
        log.expect(1000, 100)
        now[0] += 60.0
        assert log.time_left(120) == 2640.0  # 20 steps in 60 s, 880 more


def test_eval_line_shows_perplexity_and_what_it_is_over():
    line = eval_line(7, {"perplexity": 2.5, "loss": 0.9163, "tokens": 12345})
    assert "after step 7" in line
    assert "perplexity 2.5000" in line
    assert "12,345 tokens" in line


def test_summary_shows_a_dash_for_what_was_not_measured():
    metrics = {"steps": 0, "warmup_steps": 1, "peak_memory_bytes": 2**31}
    text = " ".join(summary_lines(metrics, memory_of=" (all)"))
    assert "speed, without the first step: - s a step" in text
    assert "- real tokens/s" in text
    assert text.endswith("peak memory 2 GiB (all)")


# ---------------------------------------------------------------------------- runs that go on


def written(directory, steps, **arguments):
    """The position of a log after a line for each step."""
    with RunLog(directory, active=True, **arguments) as log:
        for step in steps:
            log.write("train", step, {"loss": float(step)})
        return log.position


def steps_in(directory):
    return [line["step"] for line in lines_of(directory)]


def test_position_counts_lines_and_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    with RunLog(tmp_path, active=True) as log:
        assert log.position == {"num_lines": 0, "seconds": 0.0}
        now[0] += 7.0
        log.write("train", 1, {})
        assert log.position == {"num_lines": 1, "seconds": 7.0}


def test_resumed_log_forgets_later_lines_and_its_time_goes_on(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    written(tmp_path, [1, 2, 3, 4])
    now[0] = 5.0  # another boot
    with RunLog(tmp_path, active=True, earlier=True) as log:
        log.rewind(num_lines=2, seconds=50.0, step=2)
        assert steps_in(tmp_path) == [1, 2]
        assert log.position == {"num_lines": 2, "seconds": 50.0}
        now[0] += 3.0
        log.write("train", 3, {})
        assert log.position == {"num_lines": 3, "seconds": 53.0}
    assert [(line["step"], line["time"]) for line in lines_of(tmp_path)] == [
        (1, 0.0), (2, 0.0), (3, 53.0)
    ]  # fmt: skip


def test_earlier_lines_stay_until_the_log_is_rewound(tmp_path):
    written(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with RunLog(tmp_path, active=True, earlier=True):
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_line_torn_by_a_crash_is_cut_off(tmp_path, capsys):
    written(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "st')
    with RunLog(tmp_path, active=True, earlier=True) as log:
        log.rewind(num_lines=2, seconds=0.0, step=2)
        log.write("train", 3, {})
    assert steps_in(tmp_path) == [1, 2, 3]
    assert capsys.readouterr().out == ""


def test_lines_that_are_missing_or_torn_are_counted_and_named(tmp_path, capsys):
    written(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with RunLog(tmp_path, active=True, earlier=True) as log:
        log.rewind(num_lines=3, seconds=0.0, step=3)
        assert log.position["num_lines"] == 1
        log.write("train", 4, {})
    assert steps_in(tmp_path) == [1, 4]
    assert capsys.readouterr().out == (
        "  note         metrics.jsonl held 1 of 3 lines: those between are lost\n"
    )


def test_run_that_goes_on_elsewhere_takes_the_lines_along(tmp_path):
    for name in ("source", "fork"):
        (tmp_path / name).mkdir()
    written(tmp_path / "source", [1, 2, 3, 4])
    before = (tmp_path / "source" / "metrics.jsonl").read_bytes()
    with RunLog(tmp_path / "fork", active=True) as log:
        source = tmp_path / "source" / "metrics.jsonl"
        log.rewind(num_lines=3, seconds=1.0, step=3, source=source)
        assert log.position["num_lines"] == 3
        log.write("train", 10, {})
    assert steps_in(tmp_path / "fork") == [1, 2, 3, 10]
    assert source.read_bytes() == before


def test_source_that_is_gone_leaves_an_empty_log_and_a_note(tmp_path, capsys):
    with RunLog(tmp_path, active=True) as log:
        log.rewind(num_lines=2, seconds=1.0, step=2, source=tmp_path / "absent" / "metrics.jsonl")
        assert log.position["num_lines"] == 0
    assert steps_in(tmp_path) == []
    assert "held 0 of 2 lines" in capsys.readouterr().out


def test_other_ranks_rewind_their_clock_alone(tmp_path):
    with RunLog(tmp_path, active=False, sinks=[sink := Recorder()]) as log:
        log.rewind(num_lines=5, seconds=1000.0, step=5, source=tmp_path / "x")
        log.sync()
        assert log.position["seconds"] >= 1000.0
        assert log.position["num_lines"] == 0
    assert (list(tmp_path.iterdir()), sink.told) == ([], [])


def test_sinks_get_numbers_by_the_kind_of_their_line_and_learn_which_lines_stay(tmp_path):
    line = {"loss": 1.5, "mfu": None, "skipped": False, "note": "x"}
    with shown_by(view := Mock()), RunLog(tmp_path, active=True, sinks=[sink := Recorder()]) as log:
        log.write("train", 1, line)
        log.write("event", 1, {"code": 1})
        log.write("eval", 1, {"perplexity": 4.0})
        view.reset_mock()
        log.rewind(num_lines=2, seconds=0.0, step=1)
        log.sync()
    shown = [(call.args[0], call.args[1].get("loss")) for call in view.add.call_args_list]
    assert shown == [("train", 1.5), ("event", None)]  # again, as of a run that goes on
    written(tmp_path, [2], earlier=True, sinks=[later := Recorder()])
    assert sink.told == [
        *(("begin", 0, 0), (1, {"train/loss": 1.5, "train/skipped": 0}), (1, {})),
        *((1, {"eval/perplexity": 4.0}), ("begin", 2, 1), "flush", "close"),
    ]
    assert later.told == [(2, {"train/loss": 2.0}), "close"]


def test_second_process_cannot_write_to_the_log_of_a_living_run(tmp_path):
    code = (
        "import pathlib; from dschat_lora.report.log import RunLog\n"
        f"RunLog(pathlib.Path({str(tmp_path)!r}), active=True)"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with RunLog(tmp_path, active=True) as log:
        log.write("train", 1, {})
        log.rewind(num_lines=1, seconds=0.0, step=1)  # keeps the lock
        other = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert "another run is writing to" in other.stderr
        assert steps_in(tmp_path) == [1]
    other = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert other.returncode == 0
    assert steps_in(tmp_path) == []


def test_full_disk_is_kept_as_the_failure_and_nothing_more_is_written(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    monkeypatch.setattr(log_module, "open_alone", lambda _: open("/dev/full", "a+"))  # noqa: SIM115
    with RunLog(tmp_path, active=True, earlier=True) as log:
        log.write("train", 1, {"loss": 1.0})
        first = log.failure
        assert first.errno == errno.ENOSPC
        log.write("train", 2, {"loss": 1.0})
        assert log.failure is first
        assert log.position["num_lines"] == 0
        with pytest.raises(OSError, match="No space left"):
            log.sync()


def test_lines_are_on_the_disk_after_sync(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(log_module.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    with RunLog(tmp_path, active=True) as log:
        log.write("train", 1, {})
        log.sync()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_ino]


def test_an_event_is_written_and_said_behind_its_label(tmp_path, capsys):
    with RunLog(tmp_path, active=True) as log:
        log.report_event(3, "empty_batch", "nothing was learnt")
        log.report_event(4, "note", "memory was freed", label="note")
    events = [(x["step"], x["event"], x["message"]) for x in lines_of(tmp_path)]
    assert events == [(3, "empty_batch", "nothing was learnt"), (4, "note", "memory was freed")]
    assert capsys.readouterr().out == (
        "  warning      nothing was learnt\n  note         memory was freed\n"
    )
