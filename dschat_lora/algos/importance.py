"""Importance weights where tokens were drawn from another distribution than the one that learns.

That are top-p, another temperature, other kernels or types of an inference engine, or an adapter of
some steps ago. N responses are right-padded to R tokens; masks are (N, R) bool, True on response
tokens, and padding may hold anything. Tensors that differ in shape are a ValueError.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dschat_lora.algos.advantages import check_same_shape
from dschat_lora.algos.kl import kl_k3

Level = Literal["token", "sequence"]


@torch.no_grad()
def importance_weights(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
    level: Level = "token",
    masks: bool = False,
) -> Tensor:
    """Ratios ``exp(logprob - sampler logprob)`` within bounds, without gradient.

    Truncated (TIS: Ionides, "Truncated importance sampling", 2008; per token as in section 4.1 of
    arXiv:1802.01561), ratios are clipped to the bounds. Masked (MIS, IcePop of arXiv:2510.18855),
    those out of bounds become 0. With the level ``sequence`` all tokens of a response have the
    product of its tokens' ratios: unbiased for the whole response, at the price of its variance.

    Args:
        logprobs: (N, R) of the tokens under the policy that the losses take them to come from.
        sampler_logprobs: (N, R) under the distribution they were drawn from, in nats.
        mask: (N, R) bool, True on response tokens.
        cap: largest weight, above 0.
        floor: smallest one, at least 0.
        level: whether each token or each response has a ratio.
        masks: MIS in the place of TIS.

    Returns:
        (N, R) weights; 1, within the bounds, where both are equal, and 0 where the mask is False.
    """
    weights = torch.exp(_log_ratios(logprobs, sampler_logprobs, mask, level))
    if masks:
        weights = torch.where((weights >= floor) & (weights <= cap), weights, 0)
    return torch.where(mask, weights.clamp(0 if masks else floor, cap), 0)


class Mismatch(NamedTuple):
    """How far what tokens were drawn from is from the policy; NaN without any token."""

    kl: float  # KL(sampler || policy) by k3, nats per token
    largest_ratio: float  # of the policy's probability by the sampler's, at the weights' level


@torch.no_grad()
def sampler_mismatch(
    logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, *, level: Level = "token"
) -> Mismatch:
    """The divergence of sampler and policy; arguments are as for :func:`importance_weights`."""
    ratios = torch.exp(_log_ratios(logprobs, sampler_logprobs, mask, level))[mask]
    kl = kl_k3(sampler_logprobs[mask].double(), logprobs[mask].double())
    return Mismatch(float(kl.mean()), float(ratios.max()) if len(ratios) else torch.nan)


def _log_ratios(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """(N, R) logarithms of tokens' ratios, or of their products over each response."""
    check_same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    differences = torch.where(mask, logprobs - sampler_logprobs, 0)
    if level == "token":
        return differences
    return differences.sum(1, keepdim=True).expand_as(differences)
