"""The library of ``fault.c`` does to a small script what its first lines say."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest
from harness import operations

SCRIPT = """
import os, shutil, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

out = Path("out")
out.mkdir()
(out / "text").write_text("0123456789")
descriptor = os.open(out, os.O_RDONLY)
os.fsync(descriptor)
save_file({"a": np.zeros(1000)}, str(out / "a.safetensors"))
shutil.copyfile(out / "text", out / "copy")
os.rename(out / "copy", out / "moved")
(out / "moved").chmod(0o600)
os.truncate(out / "moved", 3)
os.pwrite(file := os.open(out / "moved", os.O_WRONLY), b"ab", 0)
os.writev(file, [b"cd", b"ef"])
(out / "inner").mkdir()
shutil.rmtree(out / "inner")
os.unlink(out / "moved")
Path("elsewhere").write_text("done")
"""
CALLS = """
    mkdir out, open out/text, write out/text, fsync out,
    open out/.tmpXXXXXX, ftruncate out/.tmpXXXXXX, write out/.tmpXXXXXX,
    open out/copy, sendfile out/copy, sendfile out/copy, rename out/copy -> out/moved,
    chmod out/moved, truncate out/moved, open out/moved, pwrite out/moved, writev out/moved,
    mkdir out/inner, rmdir out/inner, unlink out/moved
"""


@pytest.fixture
def script(fault_library, tmp_path):
    """``script(text, FAULT_...)``: how a script ended; each finds a directory of its own empty."""

    def call(text=SCRIPT, **settings):
        for name in ("out", "other"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        preloaded = {"LD_PRELOAD": str(fault_library), "FAULT_PATH": f"{tmp_path}/out"}
        environment = os.environ | preloaded | {n: str(value) for n, value in settings.items()}
        return subprocess.run(
            [sys.executable, "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


@pytest.fixture
def counted(script, tmp_path):
    """``counted(text, FAULT_...)``: the operations of a script that ended well."""

    def call(text=SCRIPT, **settings):
        done = script(text, FAULT_LOG=tmp_path / "log", **settings)
        assert done.returncode == 0, done.stderr
        return operations(tmp_path / "log")

    return call


def number_of(name):
    return [call.strip() for call in CALLS.split(",")].index(name) + 1


def test_every_change_below_the_path_is_counted_and_nothing_else(counted, tmp_path):
    calls = counted()
    assert [each.relative_to(tmp_path) for each in calls] == [c.strip() for c in CALLS.split(",")]
    assert [each.number for each in calls] == list(range(1, 20))


@pytest.mark.parametrize(("action", "left"), [("kill", []), ("kill-after", ["out/text"])])
def test_kill_comes_before_the_call_and_kill_after_after_it(script, tmp_path, action, left):
    assert script(FAULT_AT=2, FAULT_DO=action).returncode == -signal.SIGKILL
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["out", *left]


def test_weights_of_safetensors_are_written_where_the_library_sees_it(script, tmp_path):
    script(FAULT_AT=number_of("write out/.tmpXXXXXX"), FAULT_DO="kill")
    (partial,) = (tmp_path / "out").glob(".tmp*")
    assert partial.stat().st_size > 8000  # its size was set before
    assert not any(partial.read_bytes())


@pytest.mark.parametrize(
    ("error", "call"),
    [
        *[("ENOSPC", "open out/text"), ("EDQUOT", "mkdir out/inner"), ("EACCES", "open out/text")],
        *[("EIO", "rename out/copy -> out/moved"), ("EROFS", "mkdir out/inner")],
    ],
)
def test_call_fails_with_the_error(error, call, script, tmp_path):
    done = script(FAULT_AT=number_of(call), FAULT_DO=error)
    assert done.returncode == 1
    assert os.strerror(getattr(errno, error)) in done.stderr.splitlines()[-1]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("sticky", "said", "fails_elsewhere"),
    [("", "fww", False), ("1", "fff", False), ("/other", "fww", True)],
)
def test_only_the_one_call_fails_unless_the_error_sticks(script, sticky, said, fails_elsewhere):
    text = """
import os
os.mkdir("out")
for attempt in range(3):
    try:
        open("out/a", "w").write("x")
        print("w")
    except OSError as error:
        print("f" if error.errno == 28 else error)
os.mkdir("other")
"""
    done = script(text, FAULT_AT=2, FAULT_DO="ENOSPC", FAULT_STICKY=sticky)
    assert "".join(done.stdout.split()) == said
    assert ("'other'" in done.stderr) == bool(done.returncode) == fails_elsewhere


STICKY = {
    "ENOSPC": {"write": "fails", "create": "fails", "rename": "works", "unlink": "works"},
    "EROFS": {"write": "works", "create": "fails", "rename": "fails", "unlink": "fails"},
    "EIO": {"write": "fails", "create": "fails", "rename": "fails", "unlink": "fails"},
}


@pytest.mark.parametrize(("error", "outcomes"), STICKY.items(), ids=STICKY)
def test_error_that_sticks_meets_the_calls_it_would_on_a_disk(error, outcomes, script):
    text = """
import os
os.mkdir("out")
file = os.open("out/a", os.O_CREAT | os.O_WRONLY)
for name, call in {
    "first": lambda: os.mkdir("out/first"),
    "write": lambda: os.write(file, b"x"),
    "create": lambda: os.open("out/b", os.O_CREAT | os.O_WRONLY),
    "rename": lambda: os.rename("out/a", "out/c"),
    "unlink": lambda: os.unlink("out/c" if os.path.exists("out/c") else "out/a"),
}.items():
    try:
        call()
        print(name, "works")
    except OSError:
        print(name, "fails")
"""
    done = script(text, FAULT_AT=3, FAULT_DO=error, FAULT_STICKY=1)
    expected = {"first": "fails", **outcomes}
    assert dict(line.split() for line in done.stdout.splitlines()) == expected


def test_short_write_is_half_and_the_rest_follows(script, tmp_path):
    text = "import os; os.mkdir('out'); f = os.open('out/a', 65); print(os.write(f, b'0123456789'))"
    assert script(text, FAULT_AT=3, FAULT_DO="short").stdout == "5\n"
    assert (tmp_path / "out" / "a").read_text() == "01234"


def test_stopped_process_can_be_continued(fault_library, tmp_path):
    text = "import os; os.mkdir('out'); open('out/a', 'w').write('x')"
    faults = {"FAULT_PATH": f"{tmp_path}/out", "FAULT_AT": "3", "FAULT_DO": "stop"}
    environment = os.environ | faults | {"LD_PRELOAD": str(fault_library)}
    process = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, env=environment)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert (tmp_path / "out" / "a").read_text() == ""
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "out" / "a").read_text() == "x"


@pytest.mark.parametrize(("rank", "code"), [(0, 0), (1, -signal.SIGKILL)])
def test_another_rank_is_left_alone(script, rank, code):
    faults = {"FAULT_AT": 1, "FAULT_DO": "kill", "FAULT_RANK": 1}
    assert script("import os; os.mkdir('out')", RANK=rank, **faults).returncode == code


def test_counting_begins_with_a_file(counted, tmp_path):
    text = "import os; os.mkdir('out'); open('go', 'w'); os.mkdir('out/a')"
    (only,) = counted(text, FAULT_AFTER=tmp_path / "go")
    assert only.relative_to(tmp_path) == "mkdir out/a"


def test_forked_processes_are_left_alone(counted, tmp_path):
    text = "import os; os.mkdir('out'); pid = os.fork(); os.mkdir(f'out/{pid > 0}')"
    names = [each.relative_to(tmp_path) for each in counted(text)]
    assert names == ["mkdir out", "mkdir out/True"]


def test_threads_count_each_call_once(counted):
    text = """
import os, threading
os.mkdir("out")
def work(n):
    file = os.open(f"out/{n}", os.O_CREAT | os.O_WRONLY)
    for _ in range(200):
        os.write(file, b"x")
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    assert sorted(each.number for each in counted(text)) == list(range(1, 1 + 4 + 4 * 200 + 1))


def test_opening_to_read_counts_if_wanted(script):
    text = "import os; os.mkdir('out'); os.open('out', os.O_RDONLY)"
    done = script(text, FAULT_READS=1, FAULT_AT=2, FAULT_DO="EIO")
    assert done.returncode == 1
    assert os.strerror(errno.EIO) in done.stderr
