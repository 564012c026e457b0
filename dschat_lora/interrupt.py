"""SIGTERM, SIGINT and SIGHUP: the end of the process at once or, while training, after the step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from dschat_lora.engine.distributed import max_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequested(Exception):  # noqa: N818
    """Some rank was told to stop; raised on every rank."""


class Stopped(SystemExit):
    """The end of a run that was told to stop, after its state was saved on every rank."""


class Interrupts:
    """Receives the signals; a second Ctrl-C always ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self._is_deferred = self._was_interrupted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # under nohup
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal is remembered, for the loop to act on.

        One that came too late for the loop ends the process at the end of the block.
        """
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self.received:
            raise SystemExit(128 + self.received)

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
        if again or not self._is_deferred:
            raise SystemExit(128 + number)


def name_of(number: int) -> str:
    """``SIGTERM`` of 15."""
    return signal.Signals(number).name
