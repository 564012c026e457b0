"""Scores of responses: their check, and the scaling, clipping and penalties that shape them."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, soft_overlong_punishment
from dschat_lora.algos.devices import to_device
from dschat_lora.rl.config import RewardsConfig
from dschat_lora.rl.experience import Experience
from dschat_lora.rl.rewards import shortened
from dschat_lora.rl.user_functions import UserFunctionError

# Scores that the scale of --reward_scaling initial is taken from, at least. The standard error of
# a deviation from n scores is about 1 / sqrt(2 n) of it: 18 % of 16 scores, 9 % of 64.
INITIAL_SCORES = 64


class ScoreError(UserFunctionError):
    """A score is no number; the cause says which one. Raised on every rank."""

    what = "a score"


def check_scores(experience: Experience, decode: Callable[[Sequence[int]], str]) -> None:
    """Refuse scores of a reward model that are not finite, and sums that fp32 does not hold.

    A NaN of another origin is a function's None, or of a response that could not be drawn. Call on
    every rank.

    Raises:
        ScoreError: whose cause names the first response with such a score.
    """
    total, rewards = experience.scores, experience.rewards
    model = rewards.get("reward_model", torch.zeros_like(total) if rewards else total)
    scores = torch.stack([model, total], dim=1).tolist()  # read at once
    for response, (own, added) in zip(experience.responses, scores, strict=True):
        if response.undrawn or (math.isfinite(own) and not math.isinf(added)):
            continue
        who, found = "the weighted sum of rewards", added
        if not math.isfinite(own):
            who, found = "the reward model", own
        raise ScoreError from ValueError(
            f"{who} gives {found} for {shortened(decode(response.tokens))!r} after the prompt "
            f"{shortened(decode(response.prompt))!r}; a score is a finite number"
        )


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
