"""The learning rate's shape over a run, as a pure function of the step."""

from collections.abc import Callable, Mapping

import torch
from transformers import get_scheduler

from dschat_lora.config.groups import ScheduleConfig

# Multiplier of the peak rate at each optimizer step, counted from 0.
RateFactor = Callable[[int], float]


def rate_factor(name: str, *, num_warmup_steps: int, num_steps: int) -> RateFactor:
    """The factor of one of transformers' schedulers, such as ``cosine``."""
    # transformers builds schedulers around an optimizer; only their function is wanted.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=max(1, num_steps),
    )
    factor: RateFactor = scheduler.lr_lambdas[0]
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
