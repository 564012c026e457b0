"""Launch of a stage by the deepspeed launcher, with signals forwarded to its processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def launcher_command() -> str:
    """The launcher that belongs to this interpreter."""
    return str(Path(sys.executable).with_name("deepspeed"))


class Relay:
    """Runs one command of the launcher at a time and passes signals on to its processes.

    The launcher itself must not get them: it would kill the training processes before they have
    saved, or leave them behind. A stage therefore has a session of its own, out of Ctrl-C's reach.
    """

    def __init__(self) -> None:
        #: the first signal received; 0 for none
        self.received = 0
        self._running: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block signals are recorded and forwarded; they do not end this process."""
        # Signals that are ignored, as SIGHUP is under nohup, stay so.
        numbers = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Exit code of the command by a shell's convention."""
        with subprocess.Popen(command, start_new_session=True) as process:
            self._running = process
            if self.received:
                self._pass_on(self.received)
            code = process.wait()
        self._running = None
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        process = self._running
        if process is None or process.poll() is not None:
            return
        ranks = training_processes(process.pid)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(number)
        if not ranks:  # nothing to be saved yet
            os.killpg(process.pid, signal.SIGTERM)


def training_processes(launcher: int) -> list[psutil.Process]:
    """The ranks below a launcher: not it, not its helper, not the workers of a rank."""
    try:
        below = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    ranks = [process for process in below if _is_rank(process)]
    own = {process.pid for process in ranks}
    return [process for process in ranks if _parent(process) not in own]


def _is_rank(process: psutil.Process) -> bool:
    """Whether it was started as ``python -u SCRIPT --local_rank=N ...``."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(
        word.endswith("main.py") and following.startswith("--local_rank=")
        for word, following in pairwise(words)
    )


def _parent(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        return int(process.ppid())
    return None
