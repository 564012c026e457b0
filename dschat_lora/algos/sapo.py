"""SAPO's policy loss: a smooth gate on the ratio in the place of a clip (arXiv:2511.20347)."""

import torch
from torch import Tensor

from dschat_lora.algos.ppo import PolicyLoss, masked, summed


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> PolicyLoss:
    """Sum of ``-A 4 / tau sigmoid(tau (r - 1))`` with ``r = exp(logprob - old logprob)``.

    Tau is ``temperature_pos`` > 0 where A > 0, else ``temperature_neg`` > 0. At r = 1 the gradient
    is that of ``-A r``; from there it falls smoothly, so that no token counts as clipped. As
    ``loss_type="sapo"`` of TRL's GRPOTrainer. The paper takes the mean over responses of their mean
    over tokens: ``sequence`` of :func:`dschat_lora.algos.ppo.token_weights`. Other arguments are as
    for :func:`dschat_lora.algos.ppo.policy_loss`.
    """
    logprobs, old_logprobs, advantages = masked(logprobs, old_logprobs, advantages, mask)
    temperatures = torch.full_like(advantages, temperature_neg)
    temperatures = temperatures.masked_fill(advantages > 0, temperature_pos)
    ratios = torch.exp(logprobs - old_logprobs)
    gates = 4 / temperatures * torch.sigmoid(temperatures * (ratios - 1))
    return summed(-advantages * gates, torch.zeros_like(mask), logprobs, old_logprobs)
