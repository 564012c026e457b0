"""Commands of the fork server are processes like those a user starts."""

import signal
import time
from pathlib import Path

import pytest

from helpers.launcher import StillRunningError

pytestmark = pytest.mark.stage


@pytest.fixture
def start(launcher, tmp_path):
    """``start(text)``: a script of this text, on a rank or more."""

    def call(text, *argv, **options):
        script = tmp_path / "script.py"
        script.write_text(text)
        return launcher.start(argv, tmp_path, script=script, **options)

    return call


ENDINGS = {
    "end": ("pass", 0),
    "exit code": ("raise SystemExit(7)", 7),
    "message": ("raise SystemExit('no')", 1),
    "exception": ("raise ValueError('no')", 1),
    # A shell's background jobs are born deaf to it.
    "interrupt": (
        "import os, signal; signal.signal(2, signal.default_int_handler); os.kill(os.getpid(), 2)",
        -signal.SIGINT,
    ),
    "signal": ("import os; os.abort()", -signal.SIGABRT),
}


@pytest.mark.parametrize(("text", "code"), ENDINGS.values(), ids=ENDINGS)
def test_exit_code_is_that_of_an_interpreter(text, code, start):
    assert start(text).wait() == [code]


def test_command_has_its_own_arguments_directory_environment_and_streams(start, tmp_path):
    text = """
import os, sys, tempfile, helpers
print(sys.argv[1:], os.getcwd(), os.environ["RANK"], os.environ["MINE"], __name__)
print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()), os.path.exists(tempfile.gettempdir()))
print("wrong", file=sys.stderr)
"""
    running = start(text, "--a", 1, ranks=2, env={"MINE": 3})
    assert running.wait() == [0, 0]
    for rank in range(2):
        first, second = running.out(rank).splitlines()
        assert first == f"['--a', '1'] {tmp_path} {rank} 3 __main__"
        assert second == "True '' True"
        assert running.err(rank) == "wrong\n"


def test_commands_draw_other_random_numbers_and_exit_handlers_run_as_in_interpreters(start):
    text = """
import atexit, random, numpy
atexit.register(lambda: print("bye"))
print(random.random(), numpy.random.random())
"""
    running = start(text, ranks=2)
    running.wait()
    (*first, bye), (*second, again) = (running.out(rank).split() for rank in range(2))
    assert len({*first, *second}) == 4
    assert bye == again == "bye"


@pytest.mark.parametrize("left", [True, False])
def test_interpreter_ends_as_usual_where_a_thread_of_a_group_is_left(start, left):
    text = f"""
import os, sys, threading, time
class Seen:
    def __del__(self, write=os.write):
        write(1, b"ended")
sys.seen = Seen()
thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
thread.start()
if {left}:
    open(f"/proc/self/task/{{thread.native_id}}/comm", "w").write("gloo_tcp_loop")
"""
    running = start(text, ranks=2)
    assert running.wait() == [0, 0]
    assert [running.out(rank) for rank in range(2)] == ["ended" * left] * 2


def test_rank_that_is_killed_is_seen_and_its_children_end(start):
    text = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(0 if os.environ["RANK"] == "1" else 600)
"""
    running = start(text, ranks=2)
    while not running.out(0):
        assert running.codes()[0] is None
    assert running.kill(rank=0) == [True]
    assert running.wait() == [-signal.SIGKILL, 0]
    assert running.kill() == [False, False]
    deadline = time.monotonic() + 10
    while any(is_alive(int(running.out(rank))) for rank in range(2)):
        assert time.monotonic() < deadline


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # nobody may have asked yet how an orphan ended


def test_command_that_takes_too_long_is_killed_and_shown(start):
    running = start("import time; print('waiting', flush=True); time.sleep(600)")
    while not running.out():
        assert running.codes() == [None]
    with pytest.raises(StillRunningError, match="waiting"):
        running.wait(timeout=0.1)
    while None in running.codes():
        pass
    assert running.codes() == [-signal.SIGKILL]
