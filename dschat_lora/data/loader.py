"""Data loader: the micro-batches of each optimizer step for one rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.packing import Integers, PackedRow, PackedRows, SampleCounts, TokenBudget
from dschat_lora.data.samples import Samples, TokenSet


class Collator(Protocol):
    """Makes batches; see :class:`dschat_lora.data.batch.SampleCollator`."""

    def __call__(self, rows: Sequence[Sequence[Any]]) -> object:
        """One batch of rows of samples."""

    def empty(self) -> object:
        """A batch of padding alone: a rank without rows still takes part in the forward pass."""

    def positions(self, samples: TokenSet) -> Integers:
        """(len(samples),) positions of a row for each sample alone: ``counts``' own."""

    def counts(self, samples: TokenSet) -> SampleCounts:
        """Counts of each sample in the rows of these batches."""

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(B, T) of the batch of n >= 1 rows of these lengths."""


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step."""

    batches: Sequence[Any]  # this rank's
    counts: dict[str, int]  # of all ranks, by the names of ``StepCounts``

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class StepLoader:
    """``epoch(n)`` yields, for every optimizer step of epoch ``n``, this rank's micro-batches.

    Which rows step ``k`` trains on depends on the seed, ``n``, ``k`` and the product of micro
    batch, accumulation and ranks alone, so a resumed run, or one of another shape, sees what
    it would have seen. No row is dropped: the last step of an epoch takes what is left, with
    empty batches on ranks that have none.

    Every rank assigns the rows of all ranks, and so knows their counts without communication.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        rows: Sequence[PackedRow],
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        collate: Collator,
        counts: SampleCounts | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        """Count the samples, unless ``counts`` of every one are given.

        With a ``budget``, ``rows`` are :meth:`TokenBudget.groups`, ``micro_batch_size`` is 1 and
        ``rows_per_step`` the micro-batches of a step on all ranks.
        """
        assert 0 <= rank < world_size
        assert min(micro_batch_size, gradient_accumulation_steps) >= 1
        rows = PackedRows.of(rows)
        if counts is None:
            size, stored = 1 + int(rows.samples.max(initial=-1)), samples
            if not isinstance(stored, TokenSet):
                stored = TokenSet.of([samples[index] for index in range(size)])
            counts = collate.counts(stored)
        self.counts, self.num_rows = counts, len(rows)
        self._samples, self._rows, self._collate, self._budget = samples, rows, collate, budget
        self._micro_batch_size, self._seed = micro_batch_size, seed
        self._rank, self._world_size = rank, world_size
        self.rows_per_step = micro_batch_size * gradient_accumulation_steps * world_size
        self._taken = self.rows_per_step
        self.packs = bool((np.diff(rows.ends, prepend=0) > 1).any())  # several samples a row
        if budget is not None:
            assert (micro_batch_size, budget.micro_batches) == (1, self.rows_per_step)
            self._taken, self.packs = budget.groups_per_step, budget.row_tokens is not None
        self.steps_per_epoch = -(-len(rows) // self._taken)

    def epoch(self, number: int, start_step: int = 0) -> Iterator[Window]:
        """This rank's micro-batches of each step, from ``start_step`` on.

        Every rank gets the same number of micro-batches at a step.
        """
        order = permutation(len(self._rows), "epoch", self._seed, number)
        for step in range(start_step, self.steps_per_epoch):
            first = step * self._taken
            rows = [self._rows[index] for index in order[first : first + self._taken]]
            batches = self._micro_batches(rows)
            own = batches[self._rank :: self._world_size]
            yield Window(
                [_collated(self._samples, batch, self._collate) for batch in own],
                self._count(batches),
            )

    def _micro_batches(self, rows: list[PackedRow]) -> list[list[PackedRow]]:
        """Rows of each micro-batch of each rank, those of all ranks' first ones first."""
        if self._budget is not None:
            return self._budget.assign_to_ranks(rows, self.counts, world_size=self._world_size)
        # Rows of similar length share a micro-batch: little padding, and ranks wait little for
        # each other. Within a step the order has no effect on the gradient's sum.
        order = np.argsort(-self._row_lengths(rows), kind="stable")
        rows = [rows[index] for index in order]
        return assign_to_ranks(rows, batch_size=self._micro_batch_size, world_size=self._world_size)

    def _row_lengths(self, rows: Sequence[PackedRow]) -> Integers:
        """(len(rows),) positions of each row."""
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        samples = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        up_to = np.concatenate([[0], np.cumsum(self.counts.positions[samples])])
        return np.diff(up_to[ends], prepend=0)

    def _count(self, batches: Sequence[Sequence[PackedRow]]) -> dict[str, int]:
        """Counts of a step's batches on all ranks, which are not made, by ``StepCounts``' names."""
        counts, rows = self.counts, list(chain.from_iterable(batches))
        samples = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        lengths = iter(self._row_lengths(rows).tolist())
        shapes = [
            self._collate.shape(list(islice(lengths, len(each)))) if each else (1, 1)
            for each in batches
        ]
        return {
            "num_samples": len(samples),
            "num_tokens": int(counts.tokens[samples].sum()),
            "num_targets": int(counts.targets[samples].sum()),
            "num_attended": int(counts.attended[samples].sum()),
            "num_positions": sum(height * width for height, width in shapes),
            "num_scored_pairs": sum(height * width**2 for height, width in shapes),
            "num_chosen_targets": int(counts.chosen_targets[samples].sum()),
        }


def eval_batches(
    samples: Samples,
    *,
    rows: Sequence[PackedRow],
    batch_size: int,
    rank: int,
    world_size: int,
    collate: Collator,
) -> Iterator[Any]:
    """This rank's batches of an evaluation, each row on exactly one rank.

    Every rank gets the same number of batches, through empty ones where rows run out.
    """
    batches = assign_to_ranks(rows, batch_size=batch_size, world_size=world_size)
    for batch in batches[rank::world_size]:
        yield _collated(samples, batch, collate)


def assign_to_ranks(
    rows: Sequence[PackedRow], *, batch_size: int, world_size: int
) -> list[list[PackedRow]]:
    """Rows assigned to ranks round-robin, up to ``batch_size`` a rank and batch.

    The rows of every rank's first batch come first, then those of the second ones, and so on.
    """
    per_batch = batch_size * world_size
    turns = [rows[first : first + per_batch] for first in range(0, len(rows), per_batch)]
    return [list(turn[rank::world_size]) for turn in turns for rank in range(world_size)]


def _collated(samples: Samples, rows: Sequence[PackedRow], collate: Collator) -> object:
    if not rows:
        return collate.empty()
    return collate([[samples[index] for index in row] for row in rows])
