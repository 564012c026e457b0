"""The learning rate's shape over a run, as a pure function of the step."""

from collections.abc import Callable

import torch
from transformers import get_scheduler

from dschat_lora.config.groups import ScheduleConfig

# Multiplier of the peak rate at each optimizer step, counted from 0.
RateFactor = Callable[[int], float]


def rate_factor(name: str, *, num_warmup_steps: int, num_steps: int) -> RateFactor:
    """Multiplier of the peak rate at each optimizer step, counted from 0.

    Args:
        name: one of transformers' schedulers, such as ``cosine``.
        num_warmup_steps: steps over which the rate rises linearly from 0.
        num_steps: steps of the whole run.
    """
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


def standard_schedule(optim: ScheduleConfig) -> Callable[[int], RateFactor]:
    """From the steps of the whole run, what ``--lr_scheduler_type`` makes of the rate."""
    return lambda num_steps: rate_factor(
        optim.lr_scheduler_type, num_warmup_steps=optim.num_warmup_steps, num_steps=num_steps
    )
