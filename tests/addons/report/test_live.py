"""The page of a run that goes on: how often it is written, and that it harms nothing."""

import json
import subprocess
import sys
from itertools import pairwise

from dschat_lora.addons.report.html import FILE, LEAST_SECONDS, PAUSE, LiveReport
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def begin(directory, clock):
    record = RunRecord(directory, active=True)
    record.update({"stage": "sft", "status": "running"})
    log = RunLog(directory, active=True)
    report = LiveReport(directory, log, clock)
    log.callbacks = (report,)
    return record, log, report


def write(log, step):
    log.write("train", step, {"loss": 1.0 / step})


def test_the_page_is_written_now_and_then_and_says_that_the_run_goes_on(tmp_path):
    clock = Clock()
    record, log, report = begin(tmp_path, clock)
    with log:
        write(log, 1)
        assert not (tmp_path / FILE).exists()
        clock.now = LEAST_SECONDS
        write(log, 2)
        page = (tmp_path / FILE).read_text()
        assert "Loss: 1 \u2192 0.5" in page
        assert "this page loads itself again" in page
        clock.now += LEAST_SECONDS - 1
        write(log, 3)
        assert (tmp_path / FILE).read_text() == page
        clock.now += 1
        write(log, 4)
        assert (tmp_path / FILE).read_text() != page
    record.update({"status": "finished"})
    report.end()
    assert "this page loads itself again" not in (tmp_path / FILE).read_text()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_a_page_that_takes_long_is_written_seldom(tmp_path, monkeypatch):
    clock = Clock()
    _, log, report = begin(tmp_path, clock)
    written = []

    def slow(metrics):
        clock.now += 10
        written.append(clock.now)

    monkeypatch.setattr(report, "_write", slow)
    with log:
        for second in range(2000):
            clock.now = max(clock.now, float(second))
            report("train", second, {})
    gaps = [b - a for a, b in pairwise(written)]
    assert gaps
    assert all(gap >= PAUSE * 10 for gap in gaps)


def test_reading_the_log_does_not_unlock_the_run(tmp_path):
    clock = Clock()
    _, log, _ = begin(tmp_path, clock)
    attempt = (
        "from pathlib import Path; from dschat_lora.report.directory import check_idle; "
        f"check_idle(Path({str(tmp_path)!r}))"
    )
    with log:
        clock.now = LEAST_SECONDS
        write(log, 1)
        assert (tmp_path / FILE).exists()
        ended = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True)
    assert "another run is writing to" in ended.stderr


def test_after_a_failure_that_is_told_nothing_more_is_said(tmp_path, capsys):
    _, log, report = begin(tmp_path, Clock())
    (tmp_path / FILE).mkdir()
    with log:
        write(log, 1)
    report.end(quiet=True)
    assert capsys.readouterr().err == ""


def test_a_page_that_cannot_be_written_is_said_once_and_the_run_goes_on(tmp_path, capsys):
    clock = Clock()
    _, log, report = begin(tmp_path, clock)
    (tmp_path / FILE).mkdir()
    with log:
        for step in (1, 2, 3):
            clock.now += LEAST_SECONDS
            write(log, step)
    report.end()
    assert log.failure is None
    assert capsys.readouterr().err.count(f"{tmp_path / FILE} cannot be written") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
