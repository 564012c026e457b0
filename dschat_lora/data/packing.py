"""Packing of samples into rows, and into micro-batches of so many tokens."""

import hashlib
import heapq
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.cache import code_digest, load_or_build

Integers = NDArray[np.int64]
PackedRow = tuple[int, ...]  # sample indices
ITEMS_AT_A_TIME = 2**16  # of which there are Python objects


class PackedRows(Sequence[PackedRow]):
    """Rows of sample indices, of which no Python object is kept."""

    def __init__(self, samples: Integers, ends: Integers) -> None:
        """``samples`` (n,) are those of all rows, ``ends`` (rows,) where each row ends in them."""
        self.samples, self.ends = samples, ends

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "PackedRows":
        """These rows."""
        if isinstance(rows, PackedRows):
            return rows
        rows = list(rows)
        samples = np.fromiter(chain.from_iterable(rows), np.int64)
        return cls(samples, np.cumsum([len(row) for row in rows], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...

    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        end = int(self.ends[index])
        start = int(self.ends[index - 1]) if index % len(self) else 0
        return tuple(self.samples[start:end].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class SampleCounts:
    """Counts of each sample or pair in its rows, (n,) int64."""

    tokens: Integers
    targets: Integers  # supervised predictions
    attended: Integers  # (query, key) pairs of causal attention
    positions: Integers  # of rows for this sample alone, padding included
    chosen_targets: Integers  # predictions of a pair's chosen answer, else 0


def make_rows(lengths: Integers, *, max_seq_len: int, packing: bool, seed: int) -> PackedRows:
    """Rows of sample indices, made once a run: every epoch permutes the same rows.

    ``lengths`` are (n,) tokens of each sample, at most ``max_seq_len``. Without ``packing`` each
    sample is a row; with it, samples are packed first-fit in a seeded order.
    """
    if not packing:
        return PackedRows(np.arange(len(lengths)), np.arange(1, len(lengths) + 1))
    order = permutation(len(lengths), "packing", seed)
    packed = first_fit(lengths[order], max_seq_len)
    return PackedRows(order[packed.samples], packed.ends)


def first_fit(lengths: Integers, capacity: int) -> PackedRows:
    """Places of (n,) ``lengths`` in rows: each goes into the first row that has room for it.

    O(n log n): a tree over all rows holds the most room in each subtree, and the first row
    with enough of it is found from the root down.

    Raises:
        ValueError: if an item is longer than ``capacity``.
    """
    if lengths.max(initial=0) > capacity:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit a row of {capacity}")
    row_of = np.zeros(len(lengths), np.int32)
    # Of the node n of the tree the children are 2 n and 2 n + 1; one leaf at least is unused.
    room, leaves, rows = [capacity] * 2, 1, 0
    for start in range(0, len(lengths), ITEMS_AT_A_TIME):
        for position, length in enumerate(lengths[start : start + ITEMS_AT_A_TIME].tolist(), start):
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            row_of[position] = node - leaves
            rows = max(rows, node - leaves + 1)
            room[node] -= length
            while node > 1:
                node //= 2
                room[node] = max(room[2 * node], room[2 * node + 1])
            if rows == leaves:
                level = [*room[leaves:], *[capacity] * leaves]
                levels = [level]
                while len(level) > 1:
                    level = [*map(max, level[::2], level[1::2])]
                    levels.append(level)
                room, leaves = [capacity, *chain.from_iterable(reversed(levels))], 2 * leaves
    sizes = np.bincount(row_of, minlength=rows)
    return PackedRows(np.argsort(row_of, kind="stable"), np.cumsum(sizes))


def fill(rows: Sequence[PackedRow], lengths: Integers, capacity: int) -> float:
    """Share of the rows' capacity that holds tokens, in (0, 1]; 0 without rows."""
    tokens = int(lengths[PackedRows.of(rows).samples].sum())
    return tokens / (len(rows) * capacity) if len(rows) else 0.0


def round_up(size: int, multiple_of: int) -> int:
    """The least multiple of ``multiple_of`` that is no less than ``size``."""
    return -(-size // multiple_of) * multiple_of


def keep_rows(cache: Path, key: object, make: Callable[[], PackedRows]) -> PackedRows:
    """The rows that ``make`` returns, from the cache if they were made before.

    ``key``, JSON-ready, says all that they depend on but this package's code.
    """
    text = json.dumps([key, code_digest()], sort_keys=True)
    directory = cache / f"rows-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def build(directory: Path) -> dict[str, int]:
        rows = make()
        for name in ("samples", "ends"):
            np.save(directory / f"{name}.npy", getattr(rows, name))
        return {"rows": len(rows)}

    try:
        load_or_build(directory, build)
    except (OSError, ValueError):  # of a cache that cannot be written, or of ``make`` itself
        return make()
    return PackedRows(
        *(np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("samples", "ends"))
    )


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
        so on, the larger first. Some have none where there is too little for all ranks. A row of
        several samples may be a little longer than ``row_tokens``, which costs less than one more.
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
        totals = [int(counts.tokens[list(share)].sum()) for share in shares]
        batches = []
        for total, share in sorted(zip(totals, shares, strict=True), key=lambda each: -each[0]):
            rows = _spread(share, counts.tokens, -(-total // self.row_tokens), total)
            assert rows is not None
            batches.append(rows)
        return batches


def cut_evenly(lengths: Integers, limit: int, *, multiple_of: int) -> list[slice]:
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


def _spread(
    samples: Sequence[int], tokens: Integers, parts: int, capacity: int
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


def _cut(lengths: Integers, limit: int) -> list[int]:
    """Ends of the fewest batches of up to ``limit`` positions, of samples sorted longest first."""
    ends, start = [], 0
    while start < len(lengths):
        start = min(start + limit // int(lengths[start]), len(lengths))
        ends.append(start)
    return ends
