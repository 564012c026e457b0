"""Dynamic batching: micro-batches of at most a given number of tokens."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.counts import SampleCounts
from dschat_lora.data.packed_rows import PackedRow, PackedRows
from dschat_lora.data.packing import fill, make_rows, round_up


@dataclass(frozen=True)
class TokenBudget:
    """Size of the micro-batches of a step.

    Without ``row_tokens`` each sample has a row of its own, and padding counts as tokens.
    """

    tokens: int  # most of a micro-batch
    micro_batches: int  # of a step, on all ranks
    row_tokens: int | None  # of a row of several samples, about

    @property
    def groups_per_step(self) -> int:
        """Number of :meth:`groups` that a step takes."""
        return self.micro_batches if self.row_tokens is not None else 1

    def groups(self, counts: SampleCounts, *, seed: int) -> PackedRows:
        """Samples in groups that are made once a run: epochs permute the groups.

        A group fills a micro-batch. Where padding counts it fills a whole step, as the samples of
        a step are sorted. No sample may exceed the budget.
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
        return PackedRows.of(groups)

    def fill(self, groups: Sequence[PackedRow], counts: SampleCounts) -> float:
        """Share of the budget that holds tokens, in (0, 1]; 0 without groups."""
        micro_batches = self.micro_batches // self.groups_per_step
        return fill(groups, counts.tokens, micro_batches * self.tokens)

    def assign_to_ranks(
        self, groups: Sequence[PackedRow], counts: SampleCounts, *, world_size: int
    ) -> list[list[PackedRow]]:
        """The samples of a step's groups as rows of micro-batches of sizes as equal as possible.

        The rows of every rank's first micro-batch come first, then those of the second ones, and
        so on, the larger first. Some have none where there is too little for all ranks.
        """
        samples = [index for group in groups for index in group]
        samples.sort(key=lambda index: (-counts.positions[index], index))
        if self.row_tokens is None:
            lengths = counts.positions[np.array(samples)]
            return [
                [(index,) for index in samples[batch]]
                for batch in cut_evenly(lengths, self.tokens, multiple_of=world_size)
            ]
        size = round_up(len(groups), world_size)
        shares = _spread(samples, counts.tokens, size, self.tokens)
        if shares is None:  # groups are nearly full: not every other order fits
            shares = [*groups, *[()] * (size - len(groups))]
        shares.sort(key=lambda share: -sum(counts.tokens[index] for index in share))
        return [_pack_rows(share, counts.tokens, self.row_tokens) for share in shares]


def cut_evenly(lengths: NDArray[np.int64], limit: int, *, multiple_of: int) -> list[slice]:
    """Slices of samples for the fewest batches, of sizes as equal as possible.

    ``lengths`` are (n,), n >= 1, the longest first and none longer than ``limit``, the positions
    of a batch with padding. The number of batches is a multiple of ``multiple_of``; the last of
    them may be empty.
    """
    size = round_up(len(_cut(lengths, limit)), multiple_of)
    least = bisect_left(
        range(limit), True, lo=int(lengths[0]), key=lambda limit: len(_cut(lengths, limit)) <= size
    )
    ends = _cut(lengths, least)
    ends += [len(lengths)] * (size - len(ends))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _pack_rows(samples: PackedRow, tokens: NDArray[np.int64], row_tokens: int) -> list[PackedRow]:
    """The fewest rows for the samples of a micro-batch, of similar length to save padding.

    Some may be a little longer than ``row_tokens``, which costs less than one more row.
    """
    total = int(sum(tokens[index] for index in samples))
    rows = _spread(samples, tokens, -(-total // row_tokens), total)
    assert rows is not None
    return rows


def _spread(
    samples: Sequence[int], tokens: NDArray[np.int64], parts: int, capacity: int
) -> list[PackedRow] | None:
    """Samples in ``parts`` parts of similar tokens; None if one would exceed ``capacity``.

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
    """Ends of the fewest batches of up to ``limit`` positions, of samples sorted longest first."""
    ends, start = [], 0
    while start < len(lengths):
        start = min(start + limit // int(lengths[start]), len(lengths))
        ends.append(start)
    return ends
