"""Which rows of a source are held out, and which belong to which training step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dschat_lora.data.order import permutation

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
) -> Parts:
    """Split row numbers so that phases and held-out rows are disjoint for equal seeds.

    The held-out part is taken first and is the same for every phase; the rest is cut by
    ``shares``, or whole for every phase if None.

    Args:
        size: rows of the source, unusable ones included, so that what a phase can use does
            not move the borders.
        shares: of phases 1, 2 and 3, summing to 1.
        phase: 1, 2 or 3.
        eval_ratio: held-out share in [0, 1); at least one row of two or more is held out
            unless it is 0.
        seed: of the run.
        source: number of the source, which makes its order its own.
    """
    order = permutation(size, "split", seed, source)
    held_out = _held_out(size, eval_ratio)
    rest = order[held_out:]
    if shares is not None:
        borders = [_round(sum(shares[:step]) * len(rest)) for step in (phase - 1, phase)]
        rest = rest[borders[0] : borders[1]]
    return Parts(train=np.sort(rest), eval=np.sort(order[:held_out]))


def repeats(size: int, weight: float, *, seed: int, source: int) -> Indices:
    """How often each of ``size`` rows is used per epoch, ``weight`` times on average.

    2.5 uses every row twice and a seeded half of them once more.
    """
    counts = np.full(size, int(weight), dtype=np.int64)
    once_more = _round((weight - int(weight)) * size)
    counts[permutation(size, "weight", seed, source)[:once_more]] += 1
    return counts


def _held_out(size: int, eval_ratio: float) -> int:
    if eval_ratio == 0 or size < 2:
        return 0
    return min(max(1, _round(eval_ratio * size)), size - 1)


def _round(value: float) -> int:
    """Halves up, unlike the built-in."""
    return int(value + 0.5)
