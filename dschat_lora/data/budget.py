"""Micro-batches of up to so many tokens, whatever number of samples that is."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.counts import SampleCounts
from dschat_lora.data.packing import PackedRow, fill, make_rows


@dataclass(frozen=True)
class TokenBudget:
    """What the micro-batches of a step hold.

    Attributes:
        tokens: most of a micro-batch.
        micro_batches: of a step, on all ranks.
        row_tokens: of a row of several samples, about; None where each sample has a row of its
            own, and padding counts against the budget.
    """

    tokens: int
    micro_batches: int
    row_tokens: int | None

    @property
    def groups_per_step(self) -> int:
        """How many of :meth:`groups` a step takes."""
        return self.micro_batches if self.row_tokens is not None else 1

    def groups(self, counts: SampleCounts, *, seed: int) -> list[PackedRow]:
        """Samples in groups that are made once a run: epochs permute the groups.

        A group fills a micro-batch. Where padding counts, it is whole steps that can be filled,
        as the samples of a step are sorted.

        Args:
            counts: of every sample; none may exceed the budget.
            seed: of the run.
        """
        if self.row_tokens is not None:
            return make_rows(counts.tokens, max_seq_len=self.tokens, packing=True, seed=seed)
        order = permutation(len(counts.tokens), "packing", seed)
        positions = counts.positions[order]
        before = np.concatenate([[0], np.cumsum(positions)])
        groups, start = [], 0

        def is_too_much(end: int) -> bool:
            lengths = np.sort(positions[start:end])[::-1]
            return len(_cut(lengths, self.tokens)) > self.micro_batches

        while start < len(order):
            room = before[start] + self.micro_batches * self.tokens
            most = int(np.searchsorted(before, room, side="right"))
            end = bisect_left(range(most), True, lo=start + 1, key=is_too_much) - 1
            groups.append(tuple(order[start:end].tolist()))
            start = end
        return groups

    def fill(self, groups: Sequence[PackedRow], counts: SampleCounts) -> float:
        """Share of the budget that holds tokens, in (0, 1]; 0 without groups."""
        micro_batches = self.micro_batches // self.groups_per_step
        return fill(groups, counts.tokens, micro_batches * self.tokens)

    def assign_to_ranks(
        self, groups: Sequence[PackedRow], counts: SampleCounts, *, world_size: int
    ) -> list[list[PackedRow]]:
        """The samples of a step's groups as rows of micro-batches, of as equal sizes as can be.

        Returns:
            The rows of every rank's first micro-batch, then those of the second ones, and so on;
            the larger come first. Some have none where there is too little for all ranks.
        """
        samples = [index for group in groups for index in group]
        samples.sort(key=lambda index: (-counts.positions[index], index))
        if self.row_tokens is None:
            return self._sorted_rows(samples, counts, world_size)
        size = _rounded_up(len(groups), world_size)
        shares = _spread(samples, counts.tokens, size, self.tokens)
        if shares is None:  # groups are nearly full: not every other order fits
            shares = [*groups, *[()] * (size - len(groups))]
        shares.sort(key=lambda share: -sum(counts.tokens[index] for index in share))
        return [_packed(share, counts.tokens, self.row_tokens) for share in shares]

    def _sorted_rows(
        self, samples: Sequence[int], counts: SampleCounts, world_size: int
    ) -> list[list[PackedRow]]:
        """Rows of one sample; samples of like length share a micro-batch."""
        lengths = counts.positions[np.array(samples)]
        return [
            [(index,) for index in samples[batch]]
            for batch in cut_evenly(lengths, self.tokens, multiple_of=world_size)
        ]


def cut_evenly(lengths: NDArray[np.int64], limit: int, *, multiple_of: int) -> list[slice]:
    """Rows of one sample each, in the fewest batches, and those of as equal sizes as can be.

    Args:
        lengths: (n,) of the samples, n >= 1, the longest first and none longer than ``limit``.
        limit: positions of a batch, padding included.
        multiple_of: the number of batches is one; the last of them may be empty.
    """
    size = _rounded_up(len(_cut(lengths, limit)), multiple_of)
    least = bisect_left(
        range(limit),
        True,
        lo=int(lengths[0]),
        key=lambda limit: len(_cut(lengths, limit)) <= size,
    )
    ends = _cut(lengths, least)
    ends += [len(lengths)] * (size - len(ends))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _packed(samples: PackedRow, tokens: NDArray[np.int64], row_tokens: int) -> list[PackedRow]:
    """As few rows for the samples of a micro-batch, of like length, so that little is padding.

    Some may be a little longer than ``row_tokens``, which costs less than one more row.
    """
    total = int(sum(tokens[index] for index in samples))
    rows = _spread(samples, tokens, -(-total // row_tokens), total)
    assert rows is not None
    return rows


def _spread(
    samples: Sequence[int], tokens: NDArray[np.int64], parts: int, capacity: int
) -> list[PackedRow] | None:
    """Samples in so many parts of like tokens; None if one of them would exceed ``capacity``.

    The longest first, each to the part that has the least (LPT; R. L. Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, number) for number in range(parts)]
    for index in sorted(samples, key=lambda index: (-tokens[index], index)):
        load, number = loads[0]
        load += int(tokens[index])
        if load > capacity:
            return None
        heapq.heapreplace(loads, (load, number))
        shares[number].append(index)
    return [tuple(share) for share in shares]


def _cut(lengths: NDArray[np.int64], limit: int) -> list[int]:
    """Where the fewest batches end that take up to ``limit`` positions with padding.

    Args:
        lengths: (n,) of the samples, the longest first.
        limit: at least the first of them.
    """
    ends, start = [], 0
    while start < len(lengths):
        start = min(start + limit // int(lengths[start]), len(lengths))
        ends.append(start)
    return ends


def _rounded_up(size: int, multiple_of: int) -> int:
    return -(-size // multiple_of) * multiple_of
