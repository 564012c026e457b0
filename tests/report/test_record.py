"""run.json is whole at every moment and says what was run, with what."""

import json
import math
import platform
import sys
from importlib.metadata import version

import pytest

from dschat_lora.report.record import RunRecord, circumstances


def read(directory):
    return json.loads((directory / "run.json").read_text(encoding="utf-8"))


def test_updates_add_up_and_replace_top_level_fields(tmp_path):
    record = RunRecord(tmp_path, active=True)
    record.update({"status": "running", "seed": 1})
    record.update({"status": "finished"})
    assert read(tmp_path) == {"status": "finished", "seed": 1}


def test_lists_of_numbers_and_texts_take_a_line(tmp_path):
    content = {
        "tokens": ["a", "[ b", 'c"]\n', "{"],
        "rows": [{"loss": [1.5, None, "nan"]}, {"loss": []}],
        "deep": [[1, 2], ["x"]],
    }
    RunRecord(tmp_path, active=True).update(content)
    assert read(tmp_path) == content
    lines = (tmp_path / "run.json").read_text().splitlines()
    assert [line.strip() for line in lines if "tokens" in line or "loss" in line] == [
        r'"tokens": ["a", "[ b", "c\"]\n", "{"],',
        '"loss": [1.5, null, "nan"]',
        '"loss": []',
    ]


def test_no_partial_file_is_left(tmp_path):
    RunRecord(tmp_path, active=True).update({"a": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_value_that_cannot_be_written_leaves_the_earlier_file(tmp_path):
    record = RunRecord(tmp_path, active=True)
    record.update({"a": 1})
    with pytest.raises(TypeError):
        record.update({"b": object()})
    assert read(tmp_path) == {"a": 1}


def test_numbers_that_are_not_finite_are_strings(tmp_path):
    RunRecord(tmp_path, active=True).update({"loss": math.nan, "more": {"best": [math.inf]}})
    assert read(tmp_path) == {"loss": "nan", "more": {"best": ["inf"]}}


def test_other_ranks_write_nothing(tmp_path):
    RunRecord(tmp_path, active=False).update({"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_environment_names_command_versions_commit_and_platform(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "--lora_dim", "8"])
    told = circumstances()
    assert told["command"][1:] == ["main.py", "--lora_dim", "8"]
    assert told["versions"]["python"] == platform.python_version()
    for name in ("torch", "deepspeed", "transformers", "datasets"):
        assert told["versions"][name] == version(name)
    assert told["git_commit"] is None or len(told["git_commit"]) == 40
    assert told["platform"] == platform.platform()
    json.dumps(told)


def test_package_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr("dschat_lora.report.record._PACKAGES", ("no-such-package",))
    assert circumstances()["versions"]["no-such-package"] is None


def test_machine_without_git_has_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert circumstances()["git_commit"] is None


def test_earlier_run_shows_until_the_resumed_one_takes_over(tmp_path):
    RunRecord(tmp_path, active=True).update({"status": "interrupted", "seed": 1})
    before = (tmp_path / "run.json").read_bytes()
    record = RunRecord(tmp_path, active=True, earlier=True)
    assert not record.is_open
    record.update({"status": "running", "more": 2})
    record.append("resumed", {"step": 4})
    assert (tmp_path / "run.json").read_bytes() == before
    record.release()
    assert record.is_open
    assert read(tmp_path) == {
        "status": "running", "seed": 1, "more": 2, "resumed": [{"step": 4}]
    }  # fmt: skip
    record.update({"status": "finished"})
    assert read(tmp_path)["status"] == "finished"


def test_new_run_forgets_the_earlier_ones_record_at_once(tmp_path):
    RunRecord(tmp_path, active=True).update({"seed": 1})
    record = RunRecord(tmp_path, active=True)
    assert record.is_open
    record.update({"status": "running"})
    assert read(tmp_path) == {"status": "running"}


def test_lists_grow_over_several_resumes(tmp_path):
    for step in (4, 8):
        record = RunRecord(tmp_path, active=True, earlier=True)
        record.release()
        record.append("resumed", {"step": step})
    assert read(tmp_path)["resumed"] == [{"step": 4}, {"step": 8}]


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\udcff"])
def test_record_that_cannot_be_read_is_begun_anew(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    record = RunRecord(tmp_path, active=True, earlier=True)
    record.release()
    record.append("resumed", 1)
    assert read(tmp_path) == {"resumed": [1]}


def test_other_ranks_read_and_write_nothing_when_resumed(tmp_path):
    RunRecord(tmp_path, active=True).update({"seed": 1})
    before = (tmp_path / "run.json").read_bytes()
    record = RunRecord(tmp_path, active=False, earlier=True)
    record.release()
    record.append("resumed", 1)
    assert (tmp_path / "run.json").read_bytes() == before
