"""Pretraining text mixed into the update (PTX), with a cursor of its own."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.data.batch import Batch
from dschat_lora.data.loader import Loader, Window
from dschat_lora.perf.throughput import StepCounts


@dataclass(frozen=True)
class TextWindow:
    """The text of one optimizer step."""

    batches: Sequence[Batch]  # of this rank
    num_targets: int  # supervised tokens of all ranks


class Pretraining:
    """The text of one optimizer step after another; ``coefficient`` weighs its loss per token."""

    name = "pretraining"

    def __init__(self, loader: Loader, *, coefficient: float) -> None:
        self.coefficient, self._loader = coefficient, loader
        self._step, self._counts = 0, StepCounts()
        self._windows: Iterator[Window] | None = None
        self._read: deque[tuple[Window, dict[str, Any]]] = deque()  # with the state after each
        self._state = loader.state()

    def read(self, steps: int) -> None:
        """Have the text of so many steps; a StreamError says that it cannot be read on."""
        if self._windows is None:
            self._windows = self._loader.steps(self._step)
        while len(self._read) < steps:
            window = next(self._windows)
            self._read.append((window, self._loader.state()))

    def window(self) -> TextWindow:
        """The text of the next step."""
        self.read(1)
        window, self._state = self._read.popleft()
        self._step += 1
        counts = StepCounts(**window.counts)
        self._counts += counts
        return TextWindow(window.batches, max(1, counts.num_targets))

    def take_counts(self) -> StepCounts:
        """Of the text since the last call, of all ranks."""
        counts, self._counts = self._counts, StepCounts()
        return counts

    def state(self) -> dict[str, Any]:
        return {"step": self._step, **({"stream": self._state} if self._state else {})}

    def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._loader.restore(state.get("stream", {}))
        self._windows, self._state = None, self._loader.state()
        self._read.clear()
