"""Micro-batches of each optimizer step for one rank."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dschat_lora.data.order import permutation
from dschat_lora.data.packing import Row
from dschat_lora.data.store import TokenSet


class Samples(Protocol):
    """Samples by index."""

    def __getitem__(self, index: int) -> Any: ...


class Collator(Protocol):
    """Makes batches; see :class:`dschat_lora.data.batch.SampleCollator`."""

    def __call__(self, rows: Sequence[Sequence[Any]]) -> Any:
        """One batch of rows of samples."""

    def lengths(self, samples: TokenSet) -> NDArray[np.int64]:
        """(len(samples),) tokens that each takes in a row."""

    def empty(self) -> Any:
        """A batch of nothing: a rank without rows still takes part in the forward pass."""


class StepLoader:
    """``epoch(n)`` yields, for every optimizer step of epoch ``n``, this rank's micro-batches.

    Which rows step ``k`` trains on depends on the seed, ``n``, ``k`` and the product of micro
    batch, accumulation and ranks alone, so a resumed run, or one of another shape, sees what
    it would have seen. No row is dropped: the last step of an epoch takes what is left, with
    empty batches on ranks that have none.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        rows: Sequence[Row],
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        collate: Collator,
    ) -> None:
        assert 0 <= rank < world_size
        assert min(micro_batch_size, gradient_accumulation_steps) >= 1
        self._samples = samples
        self._rows = rows
        self.num_rows = len(rows)
        self.packs = any(len(row) > 1 for row in rows)
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._collate = collate
        self.rows_per_step = micro_batch_size * gradient_accumulation_steps * world_size
        self.steps_per_epoch = -(-len(rows) // self.rows_per_step)

    def epoch(self, number: int, start_step: int = 0) -> Iterator[list[Any]]:
        """This rank's micro-batches of each step, from ``start_step`` on.

        Every rank gets the same number of micro-batches at a step.
        """
        order = permutation(len(self._rows), "epoch", self._seed, number)
        for step in range(start_step, self.steps_per_epoch):
            first = step * self.rows_per_step
            yield self._step([self._rows[i] for i in order[first : first + self.rows_per_step]])

    def _step(self, rows: list[Row]) -> list[Any]:
        packs = [[self._samples[index] for index in row] for row in rows]
        # Rows of like length share a micro-batch: little padding, and ranks wait little for
        # each other. Within a step the order has no effect on the gradient's sum.
        packs.sort(key=_tokens, reverse=True)
        return list(
            shard(
                packs,
                batch_size=self._micro_batch_size,
                rank=self._rank,
                world_size=self._world_size,
                collate=self._collate,
            )
        )


def eval_batches(
    samples: Samples,
    *,
    rows: Sequence[Row],
    batch_size: int,
    rank: int,
    world_size: int,
    collate: Collator,
) -> Iterator[Any]:
    """This rank's batches of an evaluation, each row on exactly one rank.

    Every rank gets the same number of batches, through empty ones where rows run out.
    """
    per_batch = batch_size * world_size
    for first in range(0, len(rows), per_batch):
        packs = [[samples[index] for index in row] for row in rows[first : first + per_batch]]
        yield from shard(
            packs, batch_size=batch_size, rank=rank, world_size=world_size, collate=collate
        )


def shard(
    packs: Sequence[Sequence[Any]],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    collate: Collator,
) -> Iterator[Any]:
    """Deal rows out to ranks one by one, ``batch_size`` a rank and batch."""
    per_batch = batch_size * world_size
    for first in range(0, len(packs), per_batch):
        mine = packs[first : first + per_batch][rank::world_size]
        yield collate(mine) if mine else collate.empty()


def _tokens(pack: Sequence[Any]) -> int:
    return sum(len(sample.input_ids) for sample in pack)
