import errno
import fcntl
import json
import multiprocessing
import os
import shutil

import pytest

from dschat_lora.data import cache
from dschat_lora.data.cache import load_or_build


def build(directory):
    """Content of one file; what it is called again with is in ``seen``."""
    (directory / "data").write_text("data")
    return {"seen": sorted(path.name for path in directory.iterdir())}


BUILT = {"seen": ["data"]}


@pytest.fixture
def left(tmp_path):
    """Where a process that was killed leaves what it builds of ``tmp_path/key``."""
    return tmp_path / ".building-key"


def check(tmp_path):
    """Build, and find the result sound, with nothing left beside it."""
    content, from_cache = load_or_build(tmp_path / "key", build)
    assert not from_cache
    assert load_or_build(tmp_path / "key", build) == (content, True)
    assert not (tmp_path / "key").is_symlink()
    return content["seen"]


def test_what_a_process_left_between_its_manifest_and_the_renaming_is_built_whole(tmp_path, left):
    left.mkdir()
    (left / "manifest.json").write_text(json.dumps({"name": "key"}))
    assert check(tmp_path) == ["data"]
    assert not left.exists()


def test_files_of_a_killed_process_are_used_unless_another_user_left_them(
    tmp_path, left, monkeypatch
):
    left.mkdir()
    (left / "part").write_text("part")
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        assert check(tmp_path) == ["data"]
    assert (left / "part").exists()
    (tmp_path / "key" / "data").unlink()
    assert check(tmp_path) == ["data", "part"]


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_what_is_no_directory_is_not_built_in(tmp_path, left, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "file":
        left.write_text("")
    elif kind == "link":
        left.symlink_to(elsewhere)
    else:
        os.mkfifo(left)
    os.utime(left, (0, 0), follow_symlinks=False)  # abandoned long ago
    assert check(tmp_path) == ["data"]
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_nothing_is_built_through_links_in_what_was_left(tmp_path, left, kind):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "data").write_text("mine")
    left.mkdir()
    if kind == "link":
        (left / "data").symlink_to(mine / "data")
    elif kind == "hard link":
        os.link(mine / "data", left / "data")
    elif kind == "pipe":
        os.mkfifo(left / "data")
    else:
        (left / "parts").symlink_to(mine)
    assert check(tmp_path) == ["data"]
    assert (mine / "data").read_text() == "mine"


def test_a_file_system_without_locks_has_a_cache(tmp_path, left, monkeypatch):
    def flock(lock, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert check(tmp_path) == ["data"]


@pytest.mark.parametrize(
    ("error", "stays"), [(ChildProcessError, True), (KeyboardInterrupt, True), (ValueError, False)]
)
def test_an_interruption_leaves_what_is_done_and_bad_data_leave_nothing(
    tmp_path, left, error, stays
):
    def interrupted(directory):
        build(directory)
        raise error

    with pytest.raises(error):
        load_or_build(tmp_path / "key", interrupted)
    assert left.exists() == stays


def test_what_another_process_builds_under_the_name_that_was_free_stays(
    tmp_path, left, monkeypatch
):
    put_in_place = cache._put_in_place

    def and_another_begins(temporary, directory):
        put_in_place(temporary, directory)
        left.mkdir()
        (left / "part").write_text("part")

    monkeypatch.setattr(cache, "_put_in_place", and_another_begins)
    load_or_build(tmp_path / "key", build)
    assert (left / "part").exists()


def test_a_second_call_reads_what_the_first_built(tmp_path):
    target = tmp_path / "cache" / "key"
    assert load_or_build(target, build) == (BUILT, False)
    assert load_or_build(target, lambda _: pytest.fail("built twice")) == (BUILT, True)
    assert (target / "data").read_text() == "data"
    assert sorted(p.name for p in target.parent.iterdir()) == [".lock", "key"]


def move(target):
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"name": "other"}))


def become_a_file(target):
    shutil.rmtree(target)
    target.write_text("")


SPOILS = {
    "cut": lambda target: (target / "data").write_text("dat"),
    "changed": lambda target: (target / "data").write_text("dAta"),
    "lost": lambda target: (target / "data").unlink(),
    "without manifest": lambda target: (target / "manifest.json").unlink(),
    "with another manifest": lambda target: (target / "manifest.json").write_text("[1]"),
    "from elsewhere": move,
    "a file": become_a_file,
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_an_unsound_or_foreign_directory_is_rebuilt(tmp_path, spoil):
    target = tmp_path / "key"
    load_or_build(target, build)
    spoil(target)
    assert load_or_build(target, build) == (BUILT, False)
    assert load_or_build(target, build) == (BUILT, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "key"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(directory):
        build(directory)
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        load_or_build(tmp_path / "cache" / "key", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_process_that_finishes_second_keeps_the_first_result(tmp_path):
    target = tmp_path / "key"

    def overtaken(directory):
        load_or_build(target, build)
        (target / "mark").write_text("first")
        return build(directory)

    assert load_or_build(target, overtaken) == (BUILT, False)
    assert (target / "mark").exists()


def race(target, start):
    start.wait()
    for _ in range(5):
        load_or_build(target, build)


def test_processes_that_build_at_once_agree(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    target = tmp_path / "key"
    target.mkdir()  # unsound, so that all of them want to replace it
    workers = [context.Process(target=race, args=(target, start)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert load_or_build(target, build) == (BUILT, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "key"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--data_output_path .*file is not writable \(.*\)"):
        load_or_build(tmp_path / "file" / "key", build)


def test_the_cache_is_readable_by_whoever_may_read_its_parent(tmp_path):
    before = os.umask(0o022)
    try:
        load_or_build(tmp_path / "key", build)
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o755
