"""What a run leaves is found, and a living run's directory is locked."""

import errno
from pathlib import Path

import pytest

from dschat_lora.report.directory import check_idle, is_unfinished, newest_directory, open_alone


def test_directory_without_a_log_is_idle_and_looking_makes_none(tmp_path):
    check_idle(tmp_path)
    check_idle(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_locks_lets_a_run_in(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("dschat_lora.report.directory.fcntl.lockf", refuse)
    with open_alone(tmp_path / "metrics.jsonl") as file:
        file.write("{}\n")
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_last_default_directory_in_a_row_is_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert newest_directory("sft") is None
    for name in ("sft", "sft-2", "sft-4"):
        (tmp_path / "output" / name).mkdir(parents=True)
    assert newest_directory("sft") == Path("output/sft-2")
    assert newest_directory("dpo") is None


@pytest.mark.parametrize(
    ("result", "unfinished"), [("adapter", False), ("model", False), ("x", True)]
)
def test_run_with_a_result_is_finished(tmp_path, result, unfinished):
    assert is_unfinished(tmp_path)
    (tmp_path / result).mkdir()
    assert is_unfinished(tmp_path) == unfinished
