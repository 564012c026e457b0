"""The learning rate's shape over a run, as a pure function of the step.

Up to the last step the factors are those of transformers' schedulers of the same names. They are
written down here because importing those imports PEFT and bitsandbytes, which takes seconds.
"""

import math
from collections.abc import Callable, Mapping

from dschat_lora.algos.schedules import constant, linear
from dschat_lora.config.groups import ScheduleConfig

# Multiplier of the peak rate at each optimizer step, counted from 0.
RateFactor = Callable[[int], float]
# What a polynomial ends at, as a share of the peak.
POLYNOMIAL_END = 1e-7


def rate_factor(name: str, *, num_warmup_steps: int, num_steps: int) -> RateFactor:
    """The factor of a scheduler of transformers, such as ``cosine``; steps count from 0."""
    warmup, total = num_warmup_steps, max(1, num_steps)

    def factor(step: int) -> float:
        if name == "constant":
            return 1.0
        if name == "constant_with_warmup":
            return constant(step, warmup=warmup)
        if name == "linear" or step < warmup:
            return linear(step, warmup=warmup, total=total)
        progress = (step - warmup) / max(1, total - warmup)
        if name == "polynomial":
            remaining = max(0.0, 1 - progress)
            return (1 - POLYNOMIAL_END) * remaining + POLYNOMIAL_END
        assert name in ("cosine", "cosine_with_restarts"), name
        # One period of half a wave: there is nothing that restarts.
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    return factor


def rate_metrics(rates: Mapping[str, float]) -> dict[str, float | None]:
    """The rate of base weights or, where none trains, of the adapters; and the adapters' own."""
    lora = [rate for name, rate in rates.items() if name.startswith("lora")]
    base = [rate for name, rate in rates.items() if not name.startswith("lora")]
    return {"learning_rate": (base or lora)[0], "lora_learning_rate": lora[0] if lora else None}


def standard_schedule(optim: ScheduleConfig) -> Callable[[int], RateFactor]:
    """From the steps of the whole run, what ``--lr_scheduler_type`` makes of the rate."""
    return lambda num_steps: rate_factor(
        optim.lr_scheduler_type, num_warmup_steps=optim.num_warmup_steps, num_steps=num_steps
    )
