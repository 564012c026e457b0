"""metrics.jsonl is valid however a run ends; one rank alone speaks."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dschat_lora.report.log import RunLog, eval_line, jsonable, summary_lines, train_line

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
    with RunLog(tmp_path, active=False, tensorboard=tmp_path / "tb") as log:
        log.expect(10)
        log.write("train", 1, {"loss": 1.0})
        log.say("hello")
        log.advance()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_lines_for_a_person_go_to_stdout_without_a_bar_in_a_pipe(tmp_path, capsys):
    with RunLog(tmp_path, active=True) as log:
        log.expect(10)
        log.say("hello")
        log.advance()
    assert capsys.readouterr() == ("hello\n", "")


def test_tensorboard_gets_the_numbers_of_train_and_eval(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunLog(tmp_path, active=True, tensorboard=tmp_path / "tb") as log:
        log.write("train", 1, {"loss": 1.5, "mfu": None})
        log.write("train", 2, {"loss": 1.25, "mfu": None})
        log.write("eval", 2, {"perplexity": 4.0})
        log.write("event", 2, {"event": "x", "code": 1})
    board = EventAccumulator(str(tmp_path / "tb"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["eval/perplexity", "train/loss"]
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [(1, 1.5), (2, 1.25)]


def test_train_line_shows_what_a_person_watches():
    assert train_line(3, 120, TRAIN) == (
        "step   3/120  loss 1.2500  lr 5.00e-04  grad 0.5  2.00 s  1,234 tok/s  0.25 TFLOPs"
    )
    assert train_line(3, 120, TRAIN | {"mfu": 0.123}).endswith("MFU 12.3%")
    assert "lr 1.00e-03" in train_line(1, 1, TRAIN | {"lora_learning_rate": None})


def test_train_line_survives_what_is_not_known_yet():
    unknown = {"step_seconds": None, "tokens_per_second": None, "tflops_per_device": None}
    assert "loss 1.2500" in train_line(1, 1, TRAIN | unknown)


def test_eval_line_shows_perplexity_and_what_it_is_over():
    line = eval_line(7, {"perplexity": 2.5, "loss": 0.9163, "tokens": 12345})
    assert "after step 7" in line
    assert "perplexity 2.5000" in line
    assert "12,345 tokens" in line


def test_summary_shows_a_dash_for_what_was_not_measured():
    metrics = {"steps": 0, "warmup_steps": 1, "peak_memory_bytes": 2**31}
    text = " ".join(summary_lines(metrics))
    assert "- real tokens/s" in text
    assert "peak memory 2 GiB" in text
