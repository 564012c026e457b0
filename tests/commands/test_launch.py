"""Signals on their way to the processes that a launcher started."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from dschat_lora.commands.launch import Relay

pytestmark = pytest.mark.usefixtures("own_directory")


# As the launcher: two ranks, one with a worker of its own, and the code of the first that fails.
TREE = """
import subprocess, sys
argv = [sys.executable, "dschat_lora"]
ranks = [subprocess.Popen([*argv, f"--local_rank={i}"]) for i in range(2)]
sys.exit([rank.wait() for rank in ranks][0])
"""
RANK = """
import os, pathlib, signal, sys, time
me = pathlib.Path(f"got-{sys.argv[1][-1]}")
def stop(number, frame):
    with me.open("a") as file:
        file.write(f"{number} ")
    sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, stop)
if os.fork() == 0:
    me = pathlib.Path("worker")
    time.sleep(2)
    os._exit(0)
pathlib.Path(f"ready-{sys.argv[1][-1]}").touch()
time.sleep(60)
"""


def send_when_ready(number, *names):
    def wait():
        while not all(Path(name).exists() for name in names):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_reaches_every_rank_once_and_neither_launcher_nor_workers(number):
    Path("tree.py").write_text(TREE)
    Path("dschat_lora").write_text(RANK)
    relay = Relay()
    if signal.getsignal(number) == signal.SIG_IGN:  # as under nohup
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    with relay.listening():
        send_when_ready(number, "ready-0", "ready-1")
        assert relay.run([sys.executable, "tree.py"]) == 128 + number
    assert relay.received == number
    assert signal.getsignal(number) is before
    assert [Path(f"got-{i}").read_text() for i in range(2)] == [f"{int(number)} "] * 2
    assert not Path("worker").exists()


def test_launcher_without_ranks_is_ended(tmp_path):
    relay = Relay()
    with relay.listening():
        send_when_ready(signal.SIGINT, "begun")
        code = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(60)"
        assert relay.run([sys.executable, "-c", code]) == 143
    assert relay.received == signal.SIGINT


def test_signal_between_stages_ends_the_next_one():
    relay = Relay()
    with relay.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        assert relay.run([sys.executable, "-c", "import time; time.sleep(60)"]) == 143
