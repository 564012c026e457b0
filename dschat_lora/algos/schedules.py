"""Learning rate schedules of microsoft/LoRA's GPT-2 experiments: linear, constant, cosine, cycle.

They are functions of ``step``, the updates done before (from 0). transformers' schedules of the
same name agree for ``linear`` and ``constant``; its ``cosine`` counts from the end of the warm-up.
"""

import math
from collections.abc import Sequence
from itertools import pairwise


def linear(step: int, *, warmup: int, total: int) -> float:
    """Share of the peak rate: up over ``warmup`` steps, then straight down to 0 at ``total``."""
    if step < warmup:
        return step / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def constant(step: int, *, warmup: int) -> float:
    """Share of the peak rate: up over ``warmup`` steps, then 1."""
    return step / warmup if step < warmup else 1.0


def cosine(step: int, *, warmup: int, total: int) -> float:
    """Share of the peak rate: up over ``warmup`` steps, then ``(1 + cos(pi step / total)) / 2``.

    The cosine counts from the first step, not from the end of the warm-up, so the rate falls a
    little where the two meet; and the first update is at rate 0 even without warm-up.
    """
    if step == 0:
        return 0.0
    if step < warmup:
        return step / warmup
    return (1 + math.cos(math.pi * min(step, total) / total)) / 2


def cycle(step: int, *, steps: Sequence[int], rates: Sequence[float]) -> float:
    """The learning rate, interpolated between ``rates[i]`` at ``steps[i]``, then the last one.

    Segments are a millionth of a step longer than their steps, as in the original.

    Raises:
        ValueError: if the two differ in number, or ``steps`` do not rise from 0.
    """
    rising = all(a < b for a, b in pairwise(steps))
    if len(steps) != len(rates) or not steps or steps[0] != 0 or not rising:
        raise ValueError(
            f"a cycle needs as many rates as steps, which rise from 0: got steps {list(steps)} and "
            f"rates {list(rates)}"
        )
    for i, (start, end) in enumerate(pairwise(steps)):
        if start <= step < end:
            share = (step - start) / (end - start + 1e-6)
            return share * rates[i + 1] + (1 - share) * rates[i]
    return rates[-1]
