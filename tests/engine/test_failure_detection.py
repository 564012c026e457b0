"""Processes that meet, and how all end when one fails or is lost. No torch is imported here."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dschat_lora.engine import rendezvous
from dschat_lora.engine.failure_detection import check_same_software
from dschat_lora.engine.rendezvous import Member
from helpers.launcher import free_port
from helpers.spread import ALL

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, time
from dschat_lora.runtime.stage_main import fail
from dschat_lora.engine import failure_detection, rendezvous
rank, what = int(os.environ["RANK"]), sys.argv[1:]
if "late" in what and rank == 1: sys.exit(0)
if "late" in what: rendezvous.MEETING_SECONDS = 1.0
try:
    failure_detection.join()
except ValueError as error:
    fail(str(error))
failure_detection.wait_until_all_are_ready()
failure_detection.set_timeout(1.0)
print("met", os.environ["MASTER_PORT"], flush=True)
if "fail" in what and rank == 1: fail("the disk is full", code=1)
if "raise" in what and rank == 1: raise KeyError("x")
if "alike" in what: fail("all say this")
if "verdict" in what: failure_detection.after_a_step()
if "verdict" in what and rank == 1:
    time.sleep(2)
    error = RuntimeError("gloo: Connection closed")
    failure_detection.wait_for_lost_peer(error)
    raise error
if "silent" in what: failure_detection.after_a_step()
if what and what != ["late"]: time.sleep(60)
failure_detection.leave()
assert "torch" not in sys.modules
"""


class Launch:
    """So many processes of one host, or of hosts of one process each."""

    def __init__(self, *what, ranks=3, started=3, hosts=False, port=None, local="LOCAL_WORLD_SIZE"):
        self._what = what
        self._environment = {
            **{name: value for name, value in os.environ.items() if "MASTER" not in name},
            "PYTHONPATH": str(ROOT),
            "WORLD_SIZE": str(ranks),
            local: "1" if hosts else str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port or free_port()),
        }
        self.processes = [self.start(rank) for rank in range(min(ranks, started))]

    def start(self, rank):
        """The process of a rank."""
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *self._what],
            env={**self._environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_met(self):
        """The port that each says."""
        return [each.stdout.readline().split()[1] for each in self.processes]

    def ends(self, within=20):
        """Exit code and standard error of each."""
        deadline = time.monotonic() + within
        errors = [p.communicate(timeout=deadline - time.monotonic())[1] for p in self.processes]
        return [p.returncode for p in self.processes], errors


@pytest.mark.parametrize("hosts", [False, True])
def test_processes_meet_and_part(hosts):
    launch = Launch(hosts=hosts)
    assert len(set(launch.until_met())) == 1
    assert launch.ends() == ([0, 0, 0], ["", "", ""])


@pytest.mark.parametrize("launcher", ["LOCAL_SIZE", "LOCAL_WORLD_SIZE"])
def test_on_one_host_a_busy_port_is_replaced_by_one_that_all_know(launcher):
    with socket.create_server(("", 0)) as other:
        busy = other.getsockname()[1]
        launch = Launch("wait", port=busy, local=launcher)
        (port,) = set(launch.until_met())
        assert int(port) != busy
        for process in launch.processes:
            process.kill()


def test_between_hosts_a_busy_port_is_an_error():
    with socket.create_server(("", 0)) as other:
        launch = Launch(ranks=2, hosts=True, port=other.getsockname()[1])
        launch.processes[1].kill()
        assert "is in use" in launch.processes[0].communicate(timeout=20)[1]


@pytest.mark.parametrize(
    ("what", "hosts", "code", "line"),
    [
        ("fail", False, 1, "rank 1: error: the disk is full"),
        ("fail", True, 1, "rank 1: error: the disk is full"),
        # It reads like a lost peer's, and none is lost.
        ("verdict", False, 1, "rank 1: error: RuntimeError: gloo: Connection closed"),
        ("alike", False, 2, "error: all say this"),
        ("raise", False, 1, "rank 1: error: KeyError: 'x'"),
    ],
)
def test_an_error_of_any_process_is_said_once_and_ends_all(what, hosts, code, line):
    codes, errors = Launch(what, hosts=hosts).ends()
    assert codes == [code] * 3
    assert errors[0] == f"{line}\n"
    assert ("Traceback" in errors[1]) == (what in ("raise", "verdict"))
    assert errors[2] == ""


@pytest.mark.parametrize(
    ("number", "what", "reason"),
    [
        (signal.SIGKILL, "wait", "killed, or the network is cut"),
        (signal.SIGSTOP, "silent", "no sign of life for 1 s: stopped, or the network is cut"),
    ],
)
@pytest.mark.parametrize("lost", [0, 1] if ALL else [1])
def test_a_lost_process_ends_all_with_one_line(lost, number, what, reason):
    launch = Launch(what)
    launch.until_met()
    launch.processes[lost].send_signal(number)
    codes, errors = launch.ends(within=5 if number == signal.SIGKILL else 20)
    assert codes == [1 if rank != lost else -9 for rank in range(3)]
    assert "".join(errors) == f"error: rank {lost} is gone ({reason})\n"


def test_all_that_are_stopped_together_go_on_together():
    launch = Launch("silent")
    launch.until_met()
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in launch.processes:
            process.send_signal(number)
        time.sleep(4)
    assert [process.poll() for process in launch.processes] == [None] * 3
    for process in launch.processes:
        process.kill()


def test_a_process_that_does_not_come_is_named():
    launch = Launch("late", ranks=2, hosts=True)
    codes, errors = launch.ends()
    assert codes == [2, 0]
    assert errors[0].startswith("error: rank 1 did not arrive within 1 s; those that did are on ")


def test_strangers_are_turned_away():
    port = free_port()
    launch = Launch(ranks=2, started=1, hosts=True, port=port)
    for garbage in (
        b"[" * 100_000 + b"\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"[1]\n",
        b'{"rank": 7}\n',
        b'{"rank": 0}\n',
    ):
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                    stranger.sendall(garbage)
                    assert stranger.recv(100) == b""
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    launch.processes.append(launch.start(1))
    assert launch.ends() == ([0, 0], ["", ""])


def test_a_launch_is_known_by_its_parent_if_any_and_not_by_the_time_of_day(monkeypatch):
    before = rendezvous._name_on_this_host()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert rendezvous._name_on_this_host() == before
    monkeypatch.setattr(os, "getppid", lambda: 0)  # of a container's first process
    assert rendezvous._name_on_this_host().startswith("\0dschat_lora-0-")


@pytest.mark.parametrize("address", ["no-such-host.invalid", "", "a" * 70 + ".invalid"])
@pytest.mark.parametrize("size", ["1", "2"])
def test_a_name_that_does_not_resolve_is_told_at_once_on_every_rank(size, address, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"cannot resolve MASTER_ADDR '.*--master_addr"):
        rendezvous.complete_launch_variables()


def test_other_software_than_rank_0s_is_refused():
    members = [Member(r, h, 1, {"torch": v}) for r, h, v in ((0, "A", "2.13"), (1, "B", "2.12"))]
    check_same_software(members, 0)
    with pytest.raises(ValueError, match=r"torch is 2.12 here and 2.13 on host A"):
        check_same_software(members, 1)
