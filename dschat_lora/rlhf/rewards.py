"""Reward functions, and the scaling, clipping and penalty that shape their scores."""

import importlib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments
from dschat_lora.engine.collectives import raise_together, sum_over_processes
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.rlhf.batch import Response
from dschat_lora.rlhf.config import RewardsConfig
from dschat_lora.runtime.checks import working_directory

# Parameters that a reward function may have besides prompts and responses.
_MORE = ("ended", "rows", "token_ids")
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class RewardFunction:
    """A user's function that scores responses.

    It is called with lists of one entry for each response: ``prompts`` and ``responses``
    (texts), and where it has such parameters ``ended`` (whether the response ended by itself),
    ``rows`` (the row of data, as a dict) and ``token_ids``. It returns as many numbers, or None
    for a response that is not to count.
    """

    option: str  # that names it
    name: str  # module:function
    function: Callable[..., Any]
    tokenizer: Tokenizer

    def __call__(self, responses: Sequence[Response], device: torch.device) -> Tensor:
        """(N,) fp32 scores on every rank, NaN for None; each rank scores some. On every rank.

        No response is scored twice, whatever the ranks hold: a function may answer differently.

        Raises:
            ValueError: if the function returns something else.
        """
        mine = range(rank(), len(responses), world_size())
        # One rank's failure is everybody's: the first rank says what it was.
        values = raise_together(lambda: self._scores([responses[n] for n in mine]) if mine else [])
        scores = [0.0] * len(responses)
        for number, value in zip(mine, values, strict=True):
            scores[number] = value
        return torch.tensor(sum_over_processes(scores), device=device).float()

    def _scores(self, responses: list[Response]) -> list[float]:
        decode = self.tokenizer.decode
        texts = [decode(list(each.tokens), skip_special_tokens=True) for each in responses]
        more = {
            "ended": [each.ended for each in responses],
            "rows": [json.loads(each.columns or b"{}") for each in responses],
            "token_ids": [list(each.tokens) for each in responses],
        }
        more = {name: value for name, value in more.items() if _takes(self.function, name)}
        prompts = [decode(each.prompt) for each in responses]
        try:
            found = self.function(prompts=prompts, responses=texts, **more)
        except ValueError as error:
            # It would pass for a wrong option, and be shown without its place.
            raise RuntimeError(f"--{self.option} {self.name} failed") from error
        if hasattr(found, "tolist") and not isinstance(found, Tensor):
            found = found.tolist()  # an array
        is_list = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.dim() > 0)
        if not is_list or len(found) != len(responses):
            what = f"{len(found)} scores" if is_list else f"a {type(found).__name__}"
            raise ValueError(
                f"--{self.option} {self.name} returned {what} for {len(responses)} responses; "
                "it must return a list of one number, or None, for each"
            )
        return [self._number(value) for value in found]

    def _number(self, value: Any) -> float:
        if value is None:
            return math.nan
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.inf
        if math.isinf(number):
            raise ValueError(
                f"--{self.option} {self.name} returned {value!r}; scores are finite numbers, or "
                "None for a response that is not to count"
            )
        return number


# Modules that command lines know under another name.
_MOVED = {"dschat_lora.world": "dschat_lora.assets.toy_world"}


def load_function(option: str, name: str, tokenizer: Tokenizer) -> RewardFunction:
    """The function behind ``module:function``; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is no such function, or it takes other arguments.
    """
    module_name, _, function_name = name.partition(":")
    with working_directory():
        try:
            module = importlib.import_module(_MOVED.get(module_name, module_name))
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"--{option} {name} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--{option} {name}: {module_name} has no function {function_name}")
    known = ("prompts", "responses", *_MORE)
    strange = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.name not in known and p.default is p.empty and p.kind not in _OPEN
    ]
    if strange or not (_takes(function, "prompts") and _takes(function, "responses")):
        raise ValueError(
            f"--{option} {name} must take prompts and responses (and may take {', '.join(_MORE)}), "
            f"it takes {inspect.signature(function)}"
        )
    return RewardFunction(option, name, function, tokenizer)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def shaped_rewards(
    scores: Tensor, ended: Tensor, moments: RunningMoments, config: RewardsConfig
) -> tuple[Tensor, RunningMoments]:
    """Rewards from scores, and the moments with these scores counted.

    Scaled, then clipped, then lowered where the response was cut off. Scaling by the scores of
    the first iteration is that of arXiv:1909.08593, section 2.2: mean 0 and variance 1 under the
    policy before it is trained. ``scores`` are (N,) unscaled ones, NaN for a response that does
    not count, ``ended`` (N,) bool, and ``moments`` of all scores before, or of the first ones.
    """
    if config.reward_scaling == "running" or (
        config.reward_scaling == "initial" and not moments.count
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
