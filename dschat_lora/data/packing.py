"""First-fit packing of samples into rows of limited length."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.packed_rows import PackedRow, PackedRows


def make_rows(
    lengths: NDArray[np.int64], *, max_seq_len: int, packing: bool, seed: int
) -> PackedRows:
    """Rows of sample indices, made once a run: every epoch permutes the same rows.

    ``lengths`` are (n,) tokens of each sample, at most ``max_seq_len``. Without ``packing`` each
    sample is a row; with it, samples are packed first-fit in a seeded order.
    """
    if not packing:
        return PackedRows(np.arange(len(lengths)), np.arange(1, len(lengths) + 1))
    order = permutation(len(lengths), "packing", seed)
    packed = PackedRows.of(first_fit(lengths[order].tolist(), max_seq_len))
    return PackedRows(order[packed.samples], packed.ends)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Positions of ``lengths`` in rows: each goes into the first row that has room for it.

    O(n log n): a tree over all rows holds the most room in each subtree, and the first row
    with enough of it is found from the root down.

    Raises:
        ValueError: if an item is longer than ``capacity``.
    """
    if lengths and max(lengths) > capacity:
        raise ValueError(f"a sample of {max(lengths)} tokens does not fit a row of {capacity}")
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = []
    for position, length in enumerate(lengths):
        row = _first_with_room(room, length, leaves)
        if row == len(rows):
            rows.append([])
        rows[row].append(position)
        _take(room, leaves + row, length)
    return rows


def fill(rows: Sequence[PackedRow], lengths: NDArray[np.int64], capacity: int) -> float:
    """Share of the rows' capacity that holds tokens, in (0, 1]; 0 without rows."""
    tokens = int(lengths[PackedRows.of(rows).samples].sum())
    return tokens / (len(rows) * capacity) if len(rows) else 0.0


def round_up(size: int, multiple_of: int) -> int:
    """The least multiple of ``multiple_of`` that is no less than ``size``."""
    return -(-size // multiple_of) * multiple_of


def _first_with_room(room: list[int], length: int, leaves: int) -> int:
    node = 1
    while node < leaves:
        node *= 2
        if room[node] < length:
            node += 1
    return node - leaves


def _take(room: list[int], leaf: int, length: int) -> None:
    room[leaf] -= length
    node = leaf // 2
    while node:
        room[node] = max(room[2 * node], room[2 * node + 1])
        node //= 2
