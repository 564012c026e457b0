"""Shaping of rewards: scale, clip, and penalties for responses that are cut off."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, soft_overlong_punishment
from dschat_lora.algos.segments import to_device
from dschat_lora.rl.options.config import RewardsConfig

# Scores that the scale of --reward_scaling initial is taken from, at least. The standard error of
# a deviation from n scores is about 1 / sqrt(2 n) of it: 18 % of 16 scores, 9 % of 64.
INITIAL_SCORES = 64


@dataclass(frozen=True)
class Shaped:
    """Rewards of an iteration's N responses."""

    rewards: Tensor  # (N,), 0 for responses that do not count
    clip_fraction: float  # share of the scores at a bound of the clip
    moments: RunningMoments  # with these scores counted


def shape(
    scores: Tensor,
    ended: Tensor,
    lengths: Sequence[int],
    moments: RunningMoments,
    config: RewardsConfig,
    *,
    longest: int,
) -> Shaped:
    """Rewards by all options of shaping, of responses of ``lengths`` tokens, up to ``longest``.

    The others are those of :func:`shaped_rewards`.
    """
    rewards, moments = shaped_rewards(scores, ended, moments, config)
    clip_fraction = float(clipped_rewards(rewards, ended, config).double().mean())
    if config.soft_overlong_tokens:
        rewards = punish_overlong(rewards, lengths, longest=longest, config=config)
    return Shaped(torch.where(scores.isnan(), 0, rewards), clip_fraction, moments)


def shaped_rewards(
    scores: Tensor, ended: Tensor, moments: RunningMoments, config: RewardsConfig
) -> tuple[Tensor, RunningMoments]:
    """Rewards from scores, and the moments with these scores counted.

    Scaled, then clipped, then lowered where the response was cut off. Scaling by the scores of
    the first iterations, as many as have ``INITIAL_SCORES``, is that of arXiv:1909.08593, section
    2.2: mean 0 and variance 1 under the policy before it is trained. ``scores`` are (N,) unscaled
    ones, NaN for a response that does not count, ``ended`` (N,) bool, and ``moments`` of all
    scores before, or of the first ones.
    """
    if config.reward_scaling == "running" or (
        config.reward_scaling == "initial" and moments.count < INITIAL_SCORES
    ):
        moments = moments.updated(scores[~scores.isnan()])
    if config.reward_scaling == "initial":
        scores = rescale_values(moments, scores)
    elif config.reward_scaling == "running":
        scores = scores / moments.std
    if config.clip_reward_value:
        limit = config.clip_reward_value
        scores = scores.clamp(-limit, limit)
    return scores - config.missing_eos_penalty * ~ended, moments


def rescale_values(moments: RunningMoments, values: Tensor) -> Tensor:
    return (values - moments.mean) / moments.std


def clipped_rewards(rewards: Tensor, ended: Tensor, config: RewardsConfig) -> Tensor:
    """(N,) bool, which of :func:`shaped_rewards` are at a bound of the clip."""
    before = rewards + config.missing_eos_penalty * ~ended
    limit = config.clip_reward_value
    return before.abs() >= limit if limit else torch.zeros_like(ended)


def punish_overlong(
    rewards: Tensor, lengths: Sequence[int], *, longest: int, config: RewardsConfig
) -> Tensor:
    """(N,) rewards, lowered for responses of ``lengths`` tokens that come near the ``longest``."""
    punishment = soft_overlong_punishment(
        torch.tensor(lengths), max_length=longest, cache=config.soft_overlong_tokens
    )
    return rewards + to_device(punishment.float(), rewards.device)
