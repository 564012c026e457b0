"""Scores of responses: who gives them, their weighted sum, and the rewards that are made of it."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, soft_overlong_punishment
from dschat_lora.algos.segments import to_device
from dschat_lora.engine.distributed import device
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.user_functions import TrainerState, shortened

REWARD_MODEL = "reward_model"  # its name in metrics
# Scores that the scale of --reward_scaling initial is taken from, at least. The standard error of
# a deviation from n scores is about 1 / sqrt(2 n) of it: 18 % of 16 scores, 9 % of 64.
INITIAL_SCORES = 64


@dataclass(frozen=True)
class Scores:
    """Scores of N responses, on every rank."""

    total: Tensor  # (N,) fp32; NaN: the response does not count
    by_name: Mapping[str, Tensor] = field(default_factory=dict)  # (N,), not weighted; NaN: none
    weights: Mapping[str, float] = field(default_factory=dict)  # in the total, by name
    metrics: Mapping[str, float] = field(default_factory=dict)  # that were logged
    columns: Mapping[str, list[Any]] = field(default_factory=dict)  # N entries, logged as well
    by_divergence: bool = False  # the score is minus the divergence from the teacher


class Scorer(Protocol):
    """What says what responses are worth."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of its rewards in metrics."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without columns that it needs, by a ValueError; by default none."""
        return  # mypy takes an empty body for an abstract one

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores of all ranks' responses; called on every rank."""


class ScoreError(UserFunctionError):
    """A score is no number; the cause says which one. Raised on every rank."""

    what = "a score"


def weighted_sum(rewards: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """(N,) sum of the rewards with a weight, of which NaN is left out; NaN where all are."""
    total = torch.zeros_like(next(iter(rewards.values())))
    scored = torch.zeros_like(total, dtype=torch.bool)
    for name, weight in weights.items():
        missing = rewards[name].isnan()
        total = total + torch.where(missing, 0, weight * rewards[name])
        scored = scored | ~missing
    return total.masked_fill(~scored, torch.nan)


@dataclass(frozen=True)
class RewardSum(Scorer):
    """The weighted sum of what scorers give, which is at most 0 where a gate is 0 or less."""

    scorers: tuple[Scorer, ...]
    weights: Mapping[str, float]  # by name, in the order in which they are summed
    gates: tuple[str, ...]
    decode: Callable[..., str]  # for errors

    @property
    def names(self) -> tuple[str, ...]:
        """Of all rewards."""
        return tuple(name for each in self.scorers for name in each.names)

    def adding(self, scorer: Scorer) -> "RewardSum":
        """With a further scorer, whose names have weights already."""
        return replace(self, scorers=(*self.scorers, scorer))

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without columns that a scorer needs."""
        for each in self.scorers:
            each.check_columns(columns)

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores; of a response that is left out, NaN.

        Raises:
            RewardError: if a function fails or returns something else than scores.
            ScoreError: if the reward model's is not finite, or the sum is more than fp32 holds.
        """
        left_out = to_device(torch.tensor([each.is_left_out for each in responses]), device())
        found = [scorer(responses, state) for scorer in self.scorers]
        by_name = {
            name: scores.masked_fill(left_out, torch.nan)
            for each in found
            for name, scores in each.by_name.items()
        }
        total = weighted_sum(by_name, self.weights)
        for gate in self.gates:
            total = torch.where(by_name[gate] <= 0, total.clamp(max=0), total)
        self._check(responses, total, by_name.get(REWARD_MODEL, torch.zeros_like(total)))
        return Scores(
            total,
            by_name,
            self.weights,
            metrics={name: value for each in found for name, value in each.metrics.items()},
            columns={name: column for each in found for name, column in each.columns.items()},
        )

    def _check(self, responses: Sequence[Response], total: Tensor, model: Tensor) -> None:
        """Refuse scores of the reward model that are not finite, and sums that fp32 does not hold.

        A NaN of another origin is a function's None, or of a response that is left out.
        """
        scores = torch.stack([model, total], dim=1).tolist()  # read at once
        for response, (own, added) in zip(responses, scores, strict=True):
            if response.is_left_out or (math.isfinite(own) and not math.isinf(added)):
                continue
            who, value = "the weighted sum of rewards", added
            if not math.isfinite(own):
                who, value = "the reward model", own
            raise ScoreError from ValueError(
                f"{who} gives {value} for {shortened(self.decode(response.tokens))!r} after the "
                f"prompt {shortened(self.decode(response.prompt))!r}; a score is a finite number"
            )


@dataclass(frozen=True)
class EpisodeScorer(Scorer):
    """What the environment or agent gave an episode, and what an agent logged beside it."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """That of the environment or agent."""
        return (self.name,)

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores; NaN where none was given."""
        given = [each.episode.reward for each in responses]
        values = [math.nan if reward is None else reward for reward in given]
        scores = to_device(torch.tensor(values), device())
        metrics, columns = dict[str, float](), dict[str, list[Any]]()
        for name in sorted({name for each in responses for name in each.episode.logged}):
            logged = [
                each.episode.logged[name] for each in responses if name in each.episode.logged
            ]
            metrics[name] = sum(logged) / len(logged)
            columns[name] = [each.episode.logged.get(name) for each in responses]
        return Scores(scores, {self.name: scores}, metrics=metrics, columns=columns)


@dataclass(frozen=True)
class TeacherScorer(Scorer):
    """Minus the divergence from the teacher, which is known once log-probabilities are."""

    names = ()

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """Zeros until then; NaN for a response that is left out."""
        total = [math.nan if each.is_left_out else 0.0 for each in responses]
        return Scores(to_device(torch.tensor(total), device()), by_divergence=True)


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
    """Rewards from scores: scaled, clipped, then lowered where the response was cut off or long.

    Scaling by the scores of the first iterations, as many as have ``INITIAL_SCORES``, is that of
    arXiv:1909.08593, section 2.2: mean 0 and variance 1 under the policy before it is trained.

    Args:
        scores: (N,) unscaled; NaN for a response that does not count.
        ended: (N,) bool, whether the response ended by itself.
        lengths: tokens of the N responses, at most ``longest``.
        moments: of all scores before, or of the first ones.
        config: the options of scale, clip and penalties.
        longest: most tokens of a response.
    """
    counts, limit, clip_fraction = ~scores.isnan(), config.clip_reward_value, 0.0
    if config.reward_scaling == "running" or (
        config.reward_scaling == "initial" and moments.count < INITIAL_SCORES
    ):
        moments = moments.updated(scores[counts])
    if config.reward_scaling == "initial":
        scores = rescale_values(moments, scores)
    elif config.reward_scaling == "running":
        scores = scores / moments.std
    if limit:
        scores = scores.clamp(-limit, limit)
        clip_fraction = float((scores.abs() >= limit).double().mean())
    rewards = scores - config.missing_eos_penalty * ~ended
    if config.soft_overlong_tokens:
        punishment = soft_overlong_punishment(
            torch.tensor(lengths), max_length=longest, cache=config.soft_overlong_tokens
        )
        rewards = rewards + to_device(punishment.float(), rewards.device)
    return Shaped(torch.where(counts, rewards, 0), clip_fraction, moments)


def rescale_values(moments: RunningMoments, values: Tensor) -> Tensor:
    return (values - moments.mean) / moments.std
