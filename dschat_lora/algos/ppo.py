"""Policy and value losses: PPO, GSPO and CISPO, summed over tokens, and the weights of tokens.

N responses are right-padded to R tokens; their mask is (N, R) bool, True on the tokens of the
response up to and including the end of sequence. Padding may hold anything, NaN included.
Tensors that differ in shape are a ValueError.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dschat_lora.algos.advantages import check_same_shape
from dschat_lora.algos.kl import kl_k3

Normalization = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class PolicyLoss:
    """0-dim tensors of the loss's dtype; all but ``total`` are without gradient."""

    total: Tensor  # loss summed over tokens
    clipped: Tensor  # number of tokens whose ratio was clipped; but for CISPO they get no gradient
    approx_kl: Tensor  # KL(old || new) summed over tokens, in nats, by k3 from tokens of old
    ratio_error: Tensor  # max |ratio - 1| over tokens, 0 without any


@dataclass(frozen=True)
class ValueLoss:
    """0-dim tensors of the loss's dtype; ``clipped`` is without gradient."""

    total: Tensor  # loss summed over tokens
    clipped: Tensor  # number of tokens whose value was clipped, which get no gradient


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Sum of ``max(-A r, -A clip(r, 1 - c, 1 + h))`` with ``r = exp(logprob - old logprob)``.

    The negative of eq. 7 of arXiv:1707.06347; an h above c is the clip-higher of section 3.1 of
    arXiv:2503.14476. With a dual clip d the loss of a token with A < 0 is at most ``-d A`` (eq. 5
    of arXiv:1912.09729).

    Args:
        logprobs: (N, R) of the response tokens under the policy, in nats; gets the gradient.
        old_logprobs: (N, R) under the policy that the responses were drawn from.
        advantages: (N, R) of the tokens.
        mask: (N, R) bool, True on response tokens.
        cliprange: c >= 0, largest fall of the ratio that is rewarded.
        cliprange_high: h >= 0, largest rise that is rewarded; None: c.
        dual_clip: d > 1; 0: none.
    """
    logprobs, old_logprobs, advantages = masked(logprobs, old_logprobs, advantages, mask)
    ratios = torch.exp(logprobs - old_logprobs)
    losses, clipped = _clipped_losses(ratios, advantages, cliprange, cliprange_high, dual_clip)
    return summed(losses, clipped, logprobs, old_logprobs)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
    by_token: bool = False,
) -> PolicyLoss:
    """:func:`policy_loss` with one ratio for all tokens of a response.

    ``s = exp(mean over the response of (logprob - old logprob))`` (eq. 7 of arXiv:2507.18071). Its
    eq. 5 is the mean over responses of ``min(s A, clip(s) A)``: tokens weigh as those of
    ``sequence`` in :func:`token_weights`. With ``by_token`` the gradient of a token's loss is that
    of its own log-probability alone (eq. 14 there), which differs where advantages do.
    """
    logprobs, old_logprobs, advantages = masked(logprobs, old_logprobs, advantages, mask)
    lengths = mask.sum(1).clamp(min=1)
    log_ratios = (logprobs - old_logprobs).sum(1) / lengths
    ratio = torch.exp(log_ratios)[:, None]
    if by_token:
        ratio = ratio.detach() * torch.exp(logprobs - logprobs.detach())
    ratios = torch.where(mask, ratio, 1)
    losses, clipped = _clipped_losses(ratios, advantages, cliprange, cliprange_high, dual_clip)
    return summed(losses, clipped, logprobs, old_logprobs)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float,
    cliprange_high: float | None = None,
) -> PolicyLoss:
    """Sum of ``-A clip(r, 1 - c, 1 + h) logprob``, the clipped ratio without gradient.

    Eq. 4 and 5 of arXiv:2506.13585: no token loses its gradient. Arguments are as for
    :func:`policy_loss`.
    """
    logprobs, old_logprobs, advantages = masked(logprobs, old_logprobs, advantages, mask)
    ratios = torch.exp(logprobs.detach() - old_logprobs)
    high = cliprange if cliprange_high is None else cliprange_high
    bounded = ratios.clamp(1 - cliprange, 1 + high)
    return summed(-advantages * bounded * logprobs, bounded != ratios, logprobs, old_logprobs)


def dro_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, beta: float
) -> PolicyLoss:
    """Sum of ``-A logprob + beta/2 (logprob - old logprob)^2``; nothing is clipped.

    Direct reward optimisation: a squared penalty in place of a ratio (arXiv:2405.19107, eq. 4, of
    tokens). Arguments are as for :func:`policy_loss`; ``beta`` >= 0 is the penalty's weight.
    """
    logprobs, old_logprobs, advantages = masked(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * logprobs + 0.5 * beta * (logprobs - old_logprobs) ** 2
    return summed(losses, torch.zeros_like(mask), logprobs, old_logprobs)


def token_weights(
    mask: Tensor, normalization: Normalization, *, max_length: int, dtype: torch.dtype
) -> Tensor:
    """(N, R) weight of each token in the sum that :func:`loss_divisor` divides, 0 elsewhere.

    ``token``: 1, so that every token weighs alike (eq. 8 of arXiv:2503.14476). ``sequence``: 1 by
    the response's length, so that every response does (eq. 3 of arXiv:2402.03300). ``constant``:
    1 by ``max_length``, most tokens of a response (section 3.2 of arXiv:2503.20783).
    """
    weights = mask.to(dtype)
    if normalization == "token":
        return weights
    if normalization == "constant":
        return weights / max_length
    return weights / mask.sum(1, keepdim=True).clamp(min=1)


def loss_divisor(lengths: list[int], normalization: Normalization) -> int:
    """Tokens of the responses of these ``lengths``, or the number of those that are not empty."""
    if normalization == "token":
        return sum(lengths)
    return sum(length > 0 for length in lengths)


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


def masked(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The three with 0 in the padding; the last two without gradient."""
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    return (
        torch.where(mask, logprobs, 0),
        torch.where(mask, old_logprobs.detach(), 0),
        torch.where(mask, advantages.detach(), 0),
    )


def _clipped_losses(
    ratios: Tensor, advantages: Tensor, low: float, high: float | None, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """(N, R) losses, and which of them do not move with the ratio."""
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - low, 1 + (low if high is None else high))
    losses, held = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        losses, held = torch.minimum(losses, bound), held | (losses > bound)
    return losses, held


def summed(losses: Tensor, clipped: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> PolicyLoss:
    errors = (torch.exp(logprobs.detach() - old_logprobs) - 1).abs()
    return PolicyLoss(
        total=losses.sum(),
        clipped=clipped.sum().to(losses.dtype),
        approx_kl=kl_k3(old_logprobs, logprobs.detach()).sum(),
        ratio_error=errors.max() if errors.numel() else errors.sum(),
    )
