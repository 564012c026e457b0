"""Proximal policy optimisation (PPO): clipped policy and value losses, summed over tokens.

N responses are right-padded to R tokens; their mask is (N, R) bool, True on the tokens of the
response up to and including the end of sequence. Padding may hold anything, NaN included.
Tensors that differ in shape are a ValueError.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_lora.algos.advantages import check_same_shape
from dschat_lora.algos.kl import kl_k3


@dataclass(frozen=True)
class PolicyLoss:
    """0-dim tensors of the loss's dtype; all but ``total`` are without gradient."""

    total: Tensor  # loss summed over tokens
    clipped: Tensor  # number of tokens whose ratio was clipped, which get no gradient
    approx_kl: Tensor  # KL(old || new) summed over tokens, in nats, by k3 from tokens of old
    ratio_error: Tensor  # max |ratio - 1| over tokens, 0 without any


@dataclass(frozen=True)
class ValueLoss:
    """0-dim tensors of the loss's dtype; ``clipped`` is without gradient."""

    total: Tensor  # loss summed over tokens
    clipped: Tensor  # number of tokens whose value was clipped, which get no gradient


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, cliprange: float
) -> PolicyLoss:
    """Sum of ``max(-A r, -A clip(r, 1 - c, 1 + c))`` with ``r = exp(logprob - old logprob)``.

    The negative of eq. 7 of arXiv:1707.06347.

    Args:
        logprobs: (N, R) of the response tokens under the policy, in nats; gets the gradient.
        old_logprobs: (N, R) under the policy that the responses were drawn from.
        advantages: (N, R) of the tokens.
        mask: (N, R) bool, True on response tokens.
        cliprange: c >= 0, largest change of the ratio that is rewarded.
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    logprobs = torch.where(mask, logprobs, 0)
    old_logprobs = torch.where(mask, old_logprobs.detach(), 0)
    advantages = torch.where(mask, advantages.detach(), 0)
    ratios = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - cliprange, 1 + cliprange)
    errors = (ratios.detach() - 1).abs()
    return PolicyLoss(
        total=torch.maximum(unclipped, clipped).sum(),
        clipped=(clipped > unclipped).sum().to(clipped.dtype),
        approx_kl=kl_k3(old_logprobs, logprobs.detach()).sum(),
        ratio_error=errors.max() if errors.numel() else errors.sum(),
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange_value: float
) -> ValueLoss:
    """Sum of ``0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``.

    Section 3 of arXiv:2005.12729 describes this clip, which OpenAI's baselines brought in.

    Args:
        values: (N, R) predicted before each response token; gets the gradient.
        old_values: (N, R) predicted when the responses were drawn.
        returns: (N, R) to be predicted.
        mask: (N, R) bool, True on response tokens.
        cliprange_value: c >= 0, largest change of a value that is rewarded, in units of reward.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns, mask=mask)
    values = torch.where(mask, values, 0)
    old_values = torch.where(mask, old_values.detach(), 0)
    returns = torch.where(mask, returns.detach(), 0)
    nearby = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped, clipped = (values - returns) ** 2, (nearby - returns) ** 2
    return ValueLoss(
        total=0.5 * torch.maximum(unclipped, clipped).sum(),
        clipped=(clipped > unclipped).sum().to(clipped.dtype),
    )
