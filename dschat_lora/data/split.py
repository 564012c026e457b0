"""Split of a source's rows into a held-out part and one part for each training step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Row numbers of one source, in file order."""

    train: Indices  # of this phase
    eval: Indices  # of no phase


def split_rows(
    size: int,
    *,
    shares: tuple[float, float, float] | None,
    phase: int,
    eval_ratio: float,
    seed: int,
    source: int,
    groups: NDArray[np.generic] | Sequence[str] | None = None,
) -> Parts:
    """Split row numbers so that phases and held-out rows are disjoint for equal seeds.

    The held-out part is taken first and is the same for every phase; the rest is cut by
    ``shares`` of phases 1, 2 and 3, which sum to 1, or whole for every phase if None. ``size``
    counts unusable rows too, so that what a phase can use does not move the borders. Unless
    ``eval_ratio`` in [0, 1) is 0, at least one row of two or more is held out. Rows of equal
    ``groups`` are held out together or not at all, if there is a group of no more than half of
    the rows. The order depends on ``seed`` and the number ``source``.
    """
    group = _numbered(np.arange(size) if groups is None else np.asarray(groups))
    sizes = np.bincount(group)
    drawn = permutation(len(sizes), "split", seed, source)
    wanted = 0
    if eval_ratio > 0 and size >= 2:
        wanted = min(max(1, _round(eval_ratio * size)), size - 1)
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[drawn[_choose(sizes[drawn], wanted, size)]] = True
    places = np.argsort(drawn)  # of each group in the order drawn
    order = np.lexsort((places[group], ~chosen[group]))
    # Without a group small enough, rows are held out whatever their group.
    held_out = int(sizes[chosen].sum()) or wanted
    rest = order[held_out:]
    if shares is not None:
        borders = [_round(sum(shares[:step]) * len(rest)) for step in (phase - 1, phase)]
        rest = rest[borders[0] : borders[1]]
    return Parts(train=np.sort(rest), eval=np.sort(order[:held_out]))


def _numbered(groups: NDArray[np.generic]) -> Indices:
    """(n,) the group of each row, numbered in the order of their first rows."""
    _, first, number = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _choose(sizes: Indices, wanted: int, size: int) -> list[int]:
    """The first groups that together have no more than ``wanted`` of ``size`` rows.

    Where all are larger, the smallest if it leaves half of the rows, else none.
    """
    chosen: list[int] = []
    count = 0
    for index, rows in enumerate(sizes.tolist()):
        if count == wanted:
            break
        if count + rows <= wanted:
            chosen.append(index)
            count += rows
    if wanted and not chosen:
        smallest = int(sizes.argmin())
        if sizes[smallest] <= size // 2:
            return [smallest]
    return chosen


def repeats(size: int, weight: float, *, seed: int, source: int) -> Indices:
    """How often each of ``size`` rows is used per epoch, ``weight`` times on average.

    2.5 uses every row twice and a seeded half of them once more.
    """
    counts = np.full(size, int(weight), dtype=np.int64)
    once_more = _round((weight - int(weight)) * size)
    counts[permutation(size, "weight", seed, source)[:once_more]] += 1
    return counts


def _round(value: float) -> int:
    """Halves up, unlike the built-in."""
    return int(value + 0.5)
