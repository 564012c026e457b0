"""SIGTERM, SIGINT and SIGHUP: the end of the process at once or, while training, after the step."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from dschat_lora.engine.distributed import max_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequested(Exception):  # noqa: N818
    """Some rank was told to stop; raised on every rank."""


class Stopped(SystemExit):
    """The end of a run that was told to stop, after its state was saved on every rank."""

    def __init__(self, code: int, directory: Path | None = None) -> None:
        """The exit code, and the ``directory`` from which the run can go on."""
        super().__init__(code)
        self.directory = directory


class Interrupts:
    """Receives the signals while training; a second Ctrl-C always ends the process at once.

    Outside of training they end the process, as they do any: a handler of ours would wait
    where a process is blocked in a collective.
    """

    def __init__(self) -> None:
        self.received = 0
        self._was_interrupted = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal is remembered, for the loop to act on.

        One that came too late for the loop ends all processes at the end of the block. Call on
        every rank.
        """
        # What is ignored, as SIGHUP is under nohup, stays so; and signals come to the main thread.
        here = threading.current_thread() is threading.main_thread()
        numbers = [n for n in SIGNALS if here and signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if received := int(max_over_ranks(float(self.received))):
            raise SystemExit(128 + received)

    def check(self) -> None:
        """End an activity that may be cut short; call on every rank.

        Raises:
            StopRequested: on every rank, if any received a signal.
        """
        if max_over_ranks(float(self.received)) > 0:
            raise StopRequested

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self._was_interrupted
        self._was_interrupted = self._was_interrupted or number == signal.SIGINT
        self.received = self.received or number
        if again:
            raise SystemExit(128 + number)


def name_of(number: int) -> str:
    """``SIGTERM`` of 15."""
    return signal.Signals(number).name
