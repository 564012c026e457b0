"""Whole commands in processes of their own, without the seconds that imports take."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
STEP1 = ROOT / "training" / "step1_sft" / "main.py"
THREADS_LEFT = TESTS / "helpers" / "threads_left.py"  # step 1, and what is left of its group


class StillRunningError(AssertionError):
    """A command took too long and was killed; the message holds what its ranks wrote."""


class Launcher:
    """Starts commands through one :mod:`helpers.forkserver`, which ends when this process does.

    Args:
        directory: receives what the commands write to their terminals.
        preload: a library that the server and its children have between them and libc.
        environment: added to this process's, for the server and for every command.
    """

    def __init__(self, directory, *, preload=None, **environment):
        self._preload = {} if preload is None else {"LD_PRELOAD": str(preload)}
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path), str(ROOT)]),
            **environment,
        }
        self._server = self._requests = self._replies = None
        self._starts = 0

    def on_host(self, first, directory, **environment):
        """A launcher whose server is forked from this one's, in the namespaces of a process.

        Args:
            first: number of a process of the host.
            directory: as of this one, on either host.
            environment: added to this one's, for every command.
        """
        other = Launcher(directory, **{**self._environment, **environment})
        paths = [other._directory / name for name in ("requests", "replies")]
        for path in paths:
            os.mkfifo(path)
        pid = self._ask({"host": first, "in": str(paths[0]), "out": str(paths[1])})
        other._server = Running(self._ask, [pid], other._directory, [])
        other._requests = paths[0].open("w", encoding="utf-8")
        other._replies = paths[1].open(encoding="utf-8")
        return other

    def start(self, argv, cwd, *, ranks=1, first=0, env=None, script=STEP1, listening=False):
        """Run ``python script argv...`` in ``cwd`` on so many ranks of one node, from ``first`` on.

        Each reads its standard input from ``Running.inputs`` if it is ``listening``, else nothing.
        ``env`` is added to the environment, from which it takes names whose value is None.
        """
        self._starts += 1
        private = self._directory / f"start-{self._starts}"
        private.mkdir()
        common = {
            **self._environment,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            # All commands have one parent, by which two launches would take each other's port.
            "TMPDIR": str(private),
            **(env or {}),
        }
        common = {name: str(value) for name, value in common.items() if value is not None}
        pids, inputs = [], []
        for rank in range(ranks):
            source = private / f"in-{rank}" if listening else Path(os.devnull)
            if listening:
                os.mkfifo(source)
                # Both ways, for that does not wait until somebody reads.
                descriptor = os.open(source, os.O_RDWR)
                inputs.append(os.fdopen(descriptor, "w", buffering=1, encoding="utf-8"))
            request = {
                "argv": [str(script), *(str(each) for each in argv)],
                "cwd": str(cwd),
                "in": str(source),
                "environment": {**common, "RANK": str(first + rank), "LOCAL_RANK": str(rank)},
                "out": str(private / f"out-{rank}"),
                "err": str(private / f"err-{rank}"),
            }
            pids.append(self._ask({"start": request}))
        return Running(self._ask, pids, private, inputs)

    def stop(self):
        """End the server, and every command that still runs."""
        if self._requests is None:
            return
        self._requests.close()
        self._server.wait(timeout=60)
        self._replies.close()
        self._server = self._requests = self._replies = None

    def _ask(self, request):
        if self._requests is None:
            self._start_server()
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return json.loads(self._replies.readline())

    def _start_server(self):
        # Arrow's allocator would start a thread, which children would miss.
        more = {"JE_ARROW_MALLOC_CONF": "background_thread:false", **self._preload}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "helpers.forkserver"],
            env={**self._environment, **more},
            cwd=self._directory,  # first on its module path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._requests, self._replies = self._server.stdin, self._server.stdout
        said = self._replies.readline()
        assert said == "ready\n", f"the fork server did not start: {said!r}"


class Running:
    """A command that was started: one process for each rank."""

    def __init__(self, ask, pids, private, inputs):
        self._ask, self.pids, self._private, self.inputs = ask, pids, private, inputs

    def codes(self):
        """Exit code of each rank: minus the signal that ended it, None while it runs."""
        return self._ask({"codes": self.pids})

    def signal(self, number, rank=None):
        """Send a signal to one rank or all; whether each was still there."""
        chosen = self.pids if rank is None else [self.pids[rank]]
        return [self._ask({"pid": pid, "signal": int(number)}) for pid in chosen]

    def kill(self, rank=None):
        """End one rank or all at once, as a lost machine would."""
        return self.signal(signal.SIGKILL, rank)

    def wait(self, timeout=120):
        """Exit codes once every rank has ended; those that have not in time are killed.

        Raises:
            StillRunningError: if any had to be.
        """
        deadline = time.monotonic() + timeout
        while None in (codes := self.codes()):
            if time.monotonic() > deadline:
                self.kill()
                written = "\n".join(
                    f"rank {rank}: {code}\n{self.output(rank)[-2000:]}"
                    for rank, code in enumerate(codes)
                )
                raise StillRunningError(f"not ended after {timeout} s\n{written}")
            time.sleep(0.02)
        return codes

    def output(self, rank=0):
        """What a rank wrote to its standard output, then to its standard error."""
        return self.out(rank) + self.err(rank)

    def out(self, rank=0):
        """What a rank wrote to its standard output."""
        return self._written(f"out-{rank}")

    def err(self, rank=0):
        """What a rank wrote to its standard error."""
        return self._written(f"err-{rank}")

    def _written(self, name):
        path = self._private / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def undisturbed_runs(start):
    """``of(name)``: where the run of this name wrote, started once and never disturbed.

    Args:
        start: gives the home of the run of a name, and the run.
    """

    @cache
    def of(name):
        home, running = start(name)
        assert not any(running.wait()), running.output()
        return home / "out"

    return of


def free_port():
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
