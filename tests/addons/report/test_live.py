"""The page of a run that goes on: how often it is written, and that it harms nothing."""

import json
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest

from dschat_lora.addons.report.html import FILE, LEAST_SECONDS, PAUSE, LiveReport
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord


@pytest.fixture
def going(tmp_path):
    """A run that goes on: its clock, which is set by hand, its record, its log and its page."""
    clock = SimpleNamespace(now=0.0)
    record = RunRecord(tmp_path, active=True)
    record.update({"stage": "sft", "status": "running"})
    log = RunLog(tmp_path, active=True)
    report = LiveReport(tmp_path, log, lambda: clock.now)
    log.callbacks = (report,)
    with log:
        yield clock, record, log, report


def write(log, step):
    log.write("train", step, {"loss": 1.0 / step})


def test_the_page_is_written_now_and_then_and_says_that_the_run_goes_on(going, tmp_path):
    clock, record, log, report = going
    write(log, 1)
    assert not (tmp_path / FILE).exists()
    clock.now = LEAST_SECONDS
    write(log, 2)
    page = (tmp_path / FILE).read_text()
    assert "Loss: 1 \u2192 0.5" in page
    assert "this page reloads" in page
    # Reading the log does not unlock the run.
    attempt = (
        "from pathlib import Path; from dschat_lora.report.directory import check_idle; "
        f"check_idle(Path({str(tmp_path)!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True)
    assert "another run is writing to" in ended.stderr
    clock.now += LEAST_SECONDS - 1
    write(log, 3)
    assert (tmp_path / FILE).read_text() == page
    clock.now += 1
    write(log, 4)
    assert (tmp_path / FILE).read_text() != page
    record.update({"status": "finished"})
    report.end()
    assert "this page reloads" not in (tmp_path / FILE).read_text()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


def test_a_page_that_takes_long_is_written_seldom(going, monkeypatch):
    clock, _, _, report = going
    written = []

    def slow(metrics):
        clock.now += 10
        written.append(clock.now)

    monkeypatch.setattr(report, "_write", slow)
    for second in range(2000):
        clock.now = max(clock.now, float(second))
        report("train", second, {})
    assert len(written) > 1
    assert all(later - earlier >= PAUSE * 10 for earlier, later in pairwise(written))


@pytest.mark.parametrize("failed", [True, False])
def test_a_page_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    going, tmp_path, capsys, failed
):
    clock, _, log, report = going
    (tmp_path / FILE).mkdir()
    for step in (1, 2, 3):
        clock.now += 0 if failed else LEAST_SECONDS
        write(log, step)
    report.end(quiet=failed)  # after a failure, which is told already
    assert log.failure is None
    said = capsys.readouterr().err
    assert said.count(f"{tmp_path / FILE} cannot be written") == (0 if failed else 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
