"""Writes stay in the directory that they are meant for, whatever lies or comes there."""

import os
import shutil
from functools import partial

import pytest

from dschat_lora.config.staging import (
    check_within,
    occupied,
    open_in_place,
    staged_directory,
    staged_file,
    write_whole,
)
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord
from dschat_lora.report.rollout_file import as_member, open_rollouts
from dschat_lora.runtime.directory import RunDirectory, check_links
from dschat_lora.supervised.inference import output_file
from helpers.links import KINDS, check_links_within_are_followed, check_no_link_is_followed


def rollouts(out):
    with RunLog(None, active=False) as log:
        open_rollouts(out, log, active=True, source=None).append(as_member([{"prompt": "a"}]))
        if log.failure is not None:
            raise log.failure


def record(out):
    found = RunRecord(out, active=True)
    found.update({"a": 1})
    found.check()


def scores(out):
    with output_file(str(out / "scores.jsonl")) as file:
        file.write("new")


def directory(out):
    with staged_directory(out / "adapter") as staging:
        (staging / "new").write_text("new")


# What writes, and the names at which it might follow a link.
WRITERS = {
    "log": (lambda out: RunLog(out, active=True).close(), ["metrics.jsonl"]),
    "record": (record, ["run.json", ".run.json.tmp"]),
    "rollouts": (rollouts, ["rollouts.jsonl.gz"]),
    "report": (lambda out: write_whole(out / "r.html", "new"), ["r.html", ".r.html.tmp"]),
    "scores": (scores, ["scores.jsonl", ".scores.jsonl.tmp"]),
    "directory": (directory, ["adapter", ".adapter.tmp", ".adapter.old"]),
}
CASES = [(writer, name) for writer, (_, names) in WRITERS.items() for name in names]


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("writer", "name"), CASES)
def test_nothing_is_written_through_a_link_out_of_the_directory(out, writer, name, kind):
    check_no_link_is_followed(out, WRITERS[writer][0], name, kind)


@pytest.mark.parametrize("writer", WRITERS)
def test_links_within_the_directory_and_the_directory_itself_may_be_links(out, writer):
    check_links_within_are_followed(out, WRITERS[writer][0])


@pytest.mark.parametrize("kind", ["hard link", "pipe"])
def test_a_file_with_another_name_and_a_pipe_are_refused_by_name(out, kind):
    if kind == "pipe":
        os.mkfifo(out / "a")
    else:
        (out / "b").write_text("mine")
        os.link(out / "b", out / "a")
    for mode in ("a", "wb", "ab+", "r+b"):
        with pytest.raises(OSError, match=r"2 hard links|not a regular file") as raised:
            open_in_place(out / "a", mode)
        assert str(out / "a") in str(raised.value)


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl.gz", "actor", "checkpoint-5"])
def test_a_run_refuses_links_and_pipes_before_it_begins(out, name):
    (out / name).symlink_to(out.parent)
    with pytest.raises(ValueError, match=f"{name} is a link to"):
        check_links(out)
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        check_links(out)


def test_a_parent_that_leads_out_of_an_occupied_directory_is_refused(out):
    (out.parent / "other").mkdir()
    (out / "actor").symlink_to("../other")
    (out / "inner").mkdir()
    (out / "link").symlink_to("inner")
    (out / "inner" / "log").symlink_to("../log")
    with occupied(out):
        write_whole(out / "link" / "a.json", "x")
        open_in_place(out / "inner" / "log", "w").close()
        for write in (partial(write_whole, text="x"), partial(open_in_place, mode="a")):
            with pytest.raises(OSError, match="actor is a link to"):
                write(out / "actor" / "a.json")
    assert not any((out.parent / "other").iterdir())


# ---------------------------------------------------------------------------- a directory that goes


def removed(out):
    shutil.rmtree(out)


def made_anew(out):
    shutil.rmtree(out)
    out.mkdir()


def replaced(out):
    out.rename(out.parent / "moved")
    out.mkdir()


def replaced_by_a_run(out):
    replaced(out)
    (out / "metrics.jsonl").write_text('{"kind": "train"}\n')


def replaced_by_a_link(out):
    out.rename(out.parent / "moved")
    (out.parent / "foreign").mkdir()
    out.symlink_to("foreign")


def replaced_by_a_file(out):
    removed(out)
    out.write_text("")


GONE = "moved, deleted or replaced while"


@pytest.mark.parametrize(
    "strike",
    [removed, made_anew, replaced, replaced_by_a_run, replaced_by_a_link, replaced_by_a_file],
)
def test_a_directory_that_goes_ends_its_run_and_another_stays_as_it_is(out, strike):
    def content(path):
        return {each: each.is_file() and each.read_bytes() for each in path.rglob("*")}

    with occupied(out), RunLog(out, active=True) as log, RunLog(None, active=False) as other:
        log.write("train", 1, {})
        assert log.failure is None
        strike(out)
        before = content(out)
        writers = [
            lambda: write_whole(out / "a" / "b.json", "x"),
            lambda: staged_directory(out / "checkpoints" / "step-1").__enter__(),
            lambda: open_in_place(out / "rollouts.jsonl.gz", "wb"),
            lambda: record(out),
        ]
        for write in writers:
            with pytest.raises(FileNotFoundError, match=GONE):
                write()
        log.write("train", 2, {})
        with pytest.raises(FileNotFoundError, match=GONE):
            log.sync()
        assert content(out) == before
        assert other.failure is None
    if strike is removed:
        assert not out.exists()


def test_a_directory_that_goes_while_a_file_is_written_gets_none(out):
    with occupied(out):
        for staged in (staged_file, staged_directory):

            def write(staged=staged):
                with staged(out / "new") as staging:
                    (staging / "a" if staged is staged_directory else staging).write_text("x")
                    replaced(out)
                    shutil.copytree(out.parent / "moved", out, dirs_exist_ok=True)

            with pytest.raises(FileNotFoundError, match=GONE):
                write()
            assert not (out / "new").exists()
            shutil.rmtree(out)
            (out.parent / "moved").rename(out)


def test_a_moved_directory_with_a_link_in_its_place_goes_on(out):
    with occupied(out):
        out.rename(out.parent / "moved")
        out.symlink_to("moved")
        write_whole(out / "a.json", "x")
    assert (out.parent / "moved" / "a.json").is_file()


def test_a_directory_that_nobody_occupies_any_more_may_be_another(out):
    with occupied(out):
        pass
    made_anew(out)
    write_whole(out / "a.json", "x")


def test_a_link_to_itself_is_refused(out):
    (out / "a").symlink_to("a")
    with pytest.raises(ValueError, match="not a regular file"):
        check_within(out / "a", out)


def test_a_run_is_refused_where_its_directory_is_reopened(out):
    (out / "checkpoints").symlink_to(out.parent)
    with pytest.raises(ValueError, match="checkpoints is a link to"):
        RunDirectory.reopen(str(out))
