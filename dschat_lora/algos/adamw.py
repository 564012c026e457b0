"""AdamW of microsoft/LoRA's GPT-2 experiments, to reproduce them."""

import math

import torch
from torch import Tensor


def adamw_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    correct_bias: bool,
    decay_after_update: bool,
) -> None:
    """One AdamW update of parameters and moments, in place.

    ``p -= lr c m / (sqrt(v) + eps)`` with moments as in Adam (arXiv:1412.6980) and, with
    ``correct_bias``, ``c = sqrt(1 - beta2^t) / (1 - beta1^t)``, else 1. ``eps`` is added to the
    uncorrected root (the form of Adam's section 2), where torch adds it to the corrected one.
    Decoupled decay ``p -= lr weight_decay p`` comes before (arXiv:1711.05101), or after.

    Args:
        parameters: to be updated.
        gradients: one for each parameter, of its shape.
        means: Adam's first moments, likewise.
        squares: Adam's second moments, likewise.
        step: t of this update, from 1.
        lr: learning rate.
        betas: decay of the two moments, in [0, 1).
        eps: > 0.
        weight_decay: >= 0.
        correct_bias: correct the moments for starting at zero.
        decay_after_update: apply the decay after the update, as the original does.
    """
    beta1, beta2 = betas
    rate = lr
    if correct_bias:
        rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    scales = torch._foreach_sqrt(squares)
    torch._foreach_add_(scales, eps)
    if weight_decay and not decay_after_update:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_addcdiv_(parameters, means, scales, -rate)
    if weight_decay and decay_after_update:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
