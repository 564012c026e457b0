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
    Decoupled decay ``p -= lr weight_decay p`` comes before (arXiv:1711.05101) or, with
    ``decay_after_update``, after, as in the original. ``means`` and ``squares`` are Adam's first
    and second moments, of the parameters' shapes like the gradients; t is ``step``, from 1.
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
