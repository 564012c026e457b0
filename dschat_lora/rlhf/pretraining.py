"""Pretraining text mixed into the update (PTX), with a cursor of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.data.batch import Batch
from dschat_lora.data.loader import StepLoader, Window
from dschat_lora.perf.throughput import StepCounts


@dataclass(frozen=True)
class TextWindow:
    """The text of one optimizer step."""

    batches: Sequence[Batch]  # of this rank
    num_targets: int  # supervised tokens of all ranks


class Pretraining:
    """Gives text step by step, epoch after epoch."""

    def __init__(self, loader: StepLoader, *, coefficient: float) -> None:
        """Begin at the first step.

        Args:
            loader: of this rank's batches.
            coefficient: weight of the loss per token.
        """
        self._loader, self.coefficient = loader, coefficient
        self._step = 0
        self._counts = StepCounts()
        self._windows: Iterator[Window] = iter(())

    def window(self) -> TextWindow:
        """The text of the next step."""
        window = next(self._windows, None)
        if window is None:
            epoch, start = divmod(self._step, self._loader.steps_per_epoch)
            self._windows = self._loader.epoch(epoch, start)
            window = next(self._windows)
        self._step += 1
        counts = StepCounts(**window.counts)
        self._counts += counts
        return TextWindow(window.batches, max(1, counts.num_targets))

    def take_counts(self) -> StepCounts:
        """Of the text since the last call, of all ranks."""
        counts, self._counts = self._counts, StepCounts()
        return counts

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"step": self._step}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        self._step = state["step"]
        self._windows = iter(())
