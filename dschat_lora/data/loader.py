"""Micro-batches of each optimizer step for one rank."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from dschat_lora.data.batch import Batch, collate, empty_batch
from dschat_lora.data.order import permutation
from dschat_lora.data.packing import Row
from dschat_lora.data.tokenize import Sample


class Samples(Protocol):
    """Samples by index."""

    def __getitem__(self, index: int) -> Sample: ...


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
        pad_id: int,
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
        self._pad_id = pad_id
        self.rows_per_step = micro_batch_size * gradient_accumulation_steps * world_size
        self.steps_per_epoch = -(-len(rows) // self.rows_per_step)

    def epoch(self, number: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step, from ``start_step`` on.

        Every rank gets the same number of micro-batches at a step.
        """
        order = permutation(len(self._rows), "epoch", self._seed, number)
        for step in range(start_step, self.steps_per_epoch):
            first = step * self.rows_per_step
            yield self._step([self._rows[i] for i in order[first : first + self.rows_per_step]])

    def _step(self, rows: list[Row]) -> list[Batch]:
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
                pad_id=self._pad_id,
            )
        )


def eval_batches(
    samples: Samples,
    *,
    rows: Sequence[Row],
    batch_size: int,
    rank: int,
    world_size: int,
    pad_id: int,
) -> Iterator[Batch]:
    """This rank's batches of an evaluation, each row on exactly one rank.

    Every rank gets the same number of batches, through empty ones where rows run out.
    """
    per_batch = batch_size * world_size
    for first in range(0, len(rows), per_batch):
        packs = [[samples[index] for index in row] for row in rows[first : first + per_batch]]
        yield from shard(
            packs, batch_size=batch_size, rank=rank, world_size=world_size, pad_id=pad_id
        )


def shard(
    packs: Sequence[Sequence[Sample]],
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    pad_id: int,
) -> Iterator[Batch]:
    """Deal rows out to ranks one by one, ``batch_size`` a rank and batch."""
    per_batch = batch_size * world_size
    for first in range(0, len(packs), per_batch):
        mine = packs[first : first + per_batch][rank::world_size]
        yield collate(mine, pad_id) if mine else empty_batch(pad_id)


def _tokens(pack: Sequence[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in pack)
