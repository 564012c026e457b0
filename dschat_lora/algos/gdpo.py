"""GDPO: advantages of several rewards, each normalised by itself (arXiv:2601.05242)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dschat_lora.algos.advantages import GRPO_EPS, grpo_advantages
from dschat_lora.algos.credit import Outcome


@torch.no_grad()
def gdpo(outcome: Outcome) -> Tensor:
    """(N,) weighted sum of GRPO's advantages by each reward, normalised over the iteration.

    ``(a - mean) / (std + 1e-4)`` over all responses that count, with Bessel's correction, where
    ``a = sum over k of w_k (r_k - mean) / (std + 1e-4)`` is taken within the responses to the
    prompt that have reward k, as by ``multi_objective_aggregation="normalize_then_sum"`` of TRL's
    GRPOTrainer. A response without reward k has 0 of it.
    """
    counts = outcome.counts
    alone = len(counts) + torch.arange(len(counts), device=counts.device)
    total = torch.zeros(len(counts), dtype=torch.float64, device=counts.device)
    for name, weight in outcome.weights.items():
        missing, rewards = outcome.rewards[name].isnan(), outcome.rewards[name].double()
        groups = torch.where(missing, alone, outcome.groups)
        total += weight * grpo_advantages(rewards.nan_to_num(0.0), groups)
    number = counts.sum()
    deviations = torch.where(counts, total - total.where(counts, 0).sum() / number, 0)
    advantages = deviations / ((deviations.square().sum() / (number - 1)).sqrt() + GRPO_EPS)
    return torch.where(counts & (number > 1), advantages, 0).to(outcome.shaped.dtype)


def some_reward_differs(total: Sequence[float], rewards: Mapping[str, Sequence[float]]) -> bool:
    """Whether two responses to a prompt have different values of one reward; NaN is none."""
    return any(len({each for each in own if each == each}) > 1 for own in rewards.values())
