"""Pretraining text mixed into the update (PTX), with a cursor of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.data.batch import Batch, SampleCollator
from dschat_lora.data.loader import StepLoader, Window, make_rows
from dschat_lora.data.samples import TokenSet
from dschat_lora.engine.distributed import data_rank, data_world_size
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.rl.config import RlhfConfig


@dataclass(frozen=True)
class TextWindow:
    """The text of one optimizer step."""

    batches: Sequence[Batch]  # of this rank
    num_targets: int  # supervised tokens of all ranks


class Pretraining:
    """The text of one optimizer step after another, epoch after epoch."""

    def __init__(self, loader: StepLoader, *, coefficient: float) -> None:
        self.coefficient = coefficient  # weight of its loss per token
        self._loader, self._step, self._counts = loader, 0, StepCounts()
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
        return {"step": self._step}

    def restore(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._windows = iter(())


def make_pretraining(texts: TokenSet, config: RlhfConfig, *, pad_id: int) -> Pretraining:
    """Unpacked rows of these texts, as many a step as there are responses."""
    rows = make_rows(
        texts.lengths, max_seq_len=config.data.max_seq_len, packing=False, seed=config.run.seed
    )
    loader = StepLoader(
        texts,
        rows=rows,
        micro_batch_size=config.batch.per_device_training_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        rank=data_rank(),
        world_size=data_world_size(),
        seed=config.run.seed,
        collate=SampleCollator(pad_id),
    )
    return Pretraining(loader, coefficient=config.pretraining.unsup_coef)
