"""Scores of responses by functions, and the scaling, clipping and penalties that shape rewards."""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, soft_overlong_punishment
from dschat_lora.algos.tensors import to_device
from dschat_lora.engine.collectives import raise_together, sum_over_processes
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.batch import Response
from dschat_lora.rl.config import RewardsConfig
from dschat_lora.rl.user_functions import (
    UserFunction,
    UserFunctionError,
    find_function,
)


class RewardError(UserFunctionError):
    """A reward function failed; the cause is its error. Raised on every rank."""

    what = "a reward function"


@dataclass(frozen=True)
class RewardFunction(UserFunction):
    """A user's function that scores responses.

    It returns a list of as many numbers, or None for a response that is not to count; a number
    where it takes one response at a time.
    """

    noun, entry = "scores", "one number, or None"

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name.partition(":")[2].partition("=")[0]

    def __call__(self, responses: Sequence[Response], device: torch.device) -> Tensor:
        """(N,) fp32 scores on every rank, NaN for None; each rank scores some. On every rank.

        No response is scored twice, whatever the ranks hold: a function may answer differently.

        Raises:
            ValueError: if the function returns something else.
        """
        by_group = self.batch == "group"
        places = [each.group if by_group else n for n, each in enumerate(responses)]
        mine = [n for n, place in enumerate(places) if place % world_size() == rank()]
        own = [responses[n] for n in mine]
        # One rank's failure is everybody's: the first rank says what it was.
        values = raise_together(lambda: self._scores(own, by_group=by_group))
        scores = [0.0] * len(responses)
        for number, value in zip(mine, values, strict=True):
            scores[number] = value
        return torch.tensor(sum_over_processes(scores), device=device).float()

    def own_scores(self, responses: Sequence[Response]) -> list[float]:
        """Scores of responses of this process, NaN for None.

        Raises:
            ValueError: if the function returns something else.
        """
        return self._scores(list(responses), by_group=False)

    def _scores(self, responses: list[Response], *, by_group: bool) -> list[float]:
        groups = dict.fromkeys(each.group if by_group else 0 for each in responses)
        scores: dict[int, float] = {}
        for group in groups:
            chosen = [n for n, r in enumerate(responses) if not by_group or r.group == group]
            part = [responses[n] for n in chosen]
            found = self.call(part)
            values = (self._number(*pair) for pair in zip(found, part, strict=True))
            scores |= dict(zip(chosen, values, strict=True))
        return [scores[n] for n in range(len(responses))]

    def _number(self, value: Any, response: Response) -> float:
        if value is None:
            return math.nan
        try:
            number = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.inf
        if not abs(number) <= torch.finfo(torch.float32).max:  # in which scores are kept
            prompt = shortened(self.tokenizer.decode(response.prompt))
            raise ValueError(
                f"--{self.option} {self.name} returned {reprlib.repr(value)} for the prompt "
                f"{prompt!r}; scores are finite numbers, or None for a response that is not to "
                "count (they are kept in fp32, which ends at 3.4e38)"
            )
        return number


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"...{text[-most:]}"


@dataclass(frozen=True)
class RewardFunctions:
    """Functions that score every response, each with a weight; none where a model alone scores."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    model_weight: float = 1.0  # of the reward model, where there is one

    def __call__(self, responses: Sequence[Response], device: torch.device) -> dict[str, Tensor]:
        """(N,) scores on every rank by the function's name, not weighted; call on every rank.

        Raises:
            RewardError: if a function fails or returns something else than scores.
        """
        try:
            return {label: each(responses, device) for label, each in self.by_label().items()}
        except Exception as error:
            raise RewardError from error

    def total(self, rewards: "dict[str, Tensor]", model: Tensor) -> Tensor:
        """(N,) weighted sum of the functions' scores and the reward ``model``'s; NaN with NaN."""
        scores = self.model_weight * model
        for weight, label in zip(self.weights, self.by_label(), strict=True):
            scores = scores + weight * rewards[label]
        return scores

    def by_label(self) -> dict[str, RewardFunction]:
        """The functions by name, those of one name numbered from the second on."""
        found: dict[str, RewardFunction] = {}
        for each in self.functions:
            label, number = each.label, 2
            while label in found:
                label, number = f"{each.label}_{number}", number + 1
            found[label] = each
        return found


def load_functions(config: RewardsConfig, tokenizer: Tokenizer) -> RewardFunctions:
    """The functions of ``--reward_function`` with their weights.

    Raises:
        ValueError: if one cannot be used.
    """
    functions = tuple(
        load_function(
            "reward_function",
            name,
            tokenizer,
            batch=config.reward_batch,
            retries=config.reward_retries,
            timeout=config.reward_timeout,
        )
        for name in config.reward_function
    )
    weights = config.reward_weights or (1.0,) * len(functions)
    return RewardFunctions(
        functions,
        weights[: len(functions)],
        weights[len(functions)] if len(weights) > len(functions) else 1.0,
    )


def load_function(
    option: str,
    name: str,
    tokenizer: Tokenizer,
    *,
    batch: str = "all",
    retries: int = 0,
    timeout: float = 0.0,
) -> RewardFunction:
    """The function behind ``module:function``; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is no such function, or it takes no responses.
    """
    function = find_function(option, name)
    return RewardFunction(option, name, function, tokenizer, batch, retries, timeout)


# Scores that the scale of --reward_scaling initial is taken from, at least. The standard error of
# a deviation from n scores is about 1 / sqrt(2 n) of it: 18 % of 16 scores, 9 % of 64.
INITIAL_SCORES = 64


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
