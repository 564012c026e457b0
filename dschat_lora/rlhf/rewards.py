"""Reward functions: several at once, each weighted, called with what they ask for."""

import asyncio
import concurrent.futures
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dschat_lora.engine.collectives import raise_together, sum_over_processes
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.report.terminal import note
from dschat_lora.rlhf.batch import Response
from dschat_lora.rlhf.builtin_rewards import builtin_function, is_builtin
from dschat_lora.rlhf.config import RewardsConfig
from dschat_lora.rlhf.reward_arguments import (
    calls_of,
    is_singular,
    named_parameters,
    required_columns,
)
from dschat_lora.runtime.checks import working_directory


class RewardError(Exception):
    """A reward function failed; the cause is its error. Raised on every rank."""


@dataclass(frozen=True)
class RewardFunction:
    """A user's function that scores responses.

    It is called by keyword with those of the arguments of
    :func:`dschat_lora.rlhf.reward_arguments.calls_of` that it takes. It returns a list of as many
    numbers, or None for a response that is not to count; a number where it takes one response at a
    time. A coroutine function is waited for, all calls of a process at once.
    """

    option: str  # that names it
    name: str  # module:function
    function: Callable[..., Any]
    tokenizer: Tokenizer
    batch: str = "all"  # of a call: "all" responses of this process, or those of a "group"
    retries: int = 0  # further tries after an error
    timeout: float = 0.0  # seconds that a try may take; 0: any

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

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse a function that asks for columns which the data lacks.

        Raises:
            ValueError: naming both.
        """
        lacking = [name for name in self._columns() if name not in columns]
        if lacking:
            raise ValueError(
                f"--{self.option} {self.name} asks for {', '.join(lacking)}; it may take prompts, "
                "responses (or completions), ended, rows, token_ids, and the columns of the data: "
                f"{', '.join(sorted(columns)) or 'there are none'}"
            )

    def _columns(self) -> list[str]:
        column = getattr(self.function, "column", None)
        return required_columns(self.function) if column is None else [column]

    def _scores(self, responses: list[Response], *, by_group: bool) -> list[float]:
        groups = dict.fromkeys(each.group if by_group else 0 for each in responses)
        scores: dict[int, float] = {}
        for group in groups:
            chosen = [n for n, r in enumerate(responses) if not by_group or r.group == group]
            part = [responses[n] for n in chosen]
            found = self._listed(self._tried(part), len(part))
            values = (self._number(*pair) for pair in zip(found, part, strict=True))
            scores |= dict(zip(chosen, values, strict=True))
        return [scores[n] for n in range(len(responses))]

    def _tried(self, responses: list[Response]) -> object:
        """What the function returns, after so many errors at most."""
        for _ in range(self.retries):
            try:
                return self._within_time(responses)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
                note(f"--{self.option} {self.name} failed and is tried again: {error!r}")
        try:
            return self._within_time(responses)
        except (ValueError, OSError) as error:
            # It would pass for a wrong option or a full disk, and be shown without its place.
            raise RuntimeError(f"--{self.option} {self.name} failed") from error

    def _within_time(self, responses: list[Response]) -> object:
        if not self.timeout:
            return self._returned(responses)
        future: concurrent.futures.Future[object] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self._returned(responses))
            except Exception as error:  # noqa: BLE001 - raised again by result()
                future.set_exception(error)

        # A daemon: a call that never returns must not keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
        try:
            return future.result(self.timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise RuntimeError(
                f"--{self.option} {self.name} took more than the {self.timeout:g} seconds of "
                f"--reward_timeout for {len(responses)} responses"
            ) from None

    def _returned(self, responses: list[Response]) -> object:
        calls = calls_of(self.function, responses, self.tokenizer)
        found = [self.function(**call) for call in calls]
        if any(inspect.isawaitable(each) for each in found):

            async def all_found() -> list[Any]:
                return list(await asyncio.gather(*found))

            return self._one_or_all(asyncio.run(all_found()))
        return self._one_or_all(found)

    def _one_or_all(self, found: list[Any]) -> Any:
        return found if is_singular(self.function) else found[0]

    def _listed(self, found: Any, count: int) -> Sequence[object]:
        if hasattr(found, "tolist") and not isinstance(found, Tensor):
            found = found.tolist()  # an array
        is_list = isinstance(found, list | tuple) or (isinstance(found, Tensor) and found.dim() > 0)
        if not is_list or len(found) != count:
            what = f"{len(found)} scores" if is_list else f"a {type(found).__name__}"
            raise ValueError(
                f"--{self.option} {self.name} returned {what} for {count} responses; "
                "it must return a list of one number, or None, for each"
            )
        return list(found)

    def _number(self, value: Any, response: Response) -> float:
        if value is None:
            return math.nan
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.inf
        if not math.isfinite(number):
            prompt = _shortened(self.tokenizer.decode(response.prompt))
            raise ValueError(
                f"--{self.option} {self.name} returned {value!r} for the prompt {prompt!r}; scores "
                "are finite numbers, or None for a response that is not to count"
            )
        return number


def _shortened(text: str, most: int = 200) -> str:
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


# Modules that command lines know under another name.
_MOVED = {"dschat_lora.world": "dschat_lora.assets.toy_world"}


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
    function = builtin_function(name) if is_builtin(name) else _imported(option, name)
    takes = named_parameters(function).keys()
    parameters = inspect.signature(function).parameters.values()
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not ({"responses", "completions", "response", "completion"} & takes or is_open):
        raise ValueError(
            f"--{option} {name} must take responses or completions (one at a time: response or "
            f"completion), it takes {inspect.signature(function)}"
        )
    return RewardFunction(option, name, function, tokenizer, batch, retries, timeout)


def _imported(option: str, name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    with working_directory():
        try:
            module = importlib.import_module(_MOVED.get(module_name, module_name))
        except (ImportError, SyntaxError) as error:
            raise ValueError(f"--{option} {name} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--{option} {name}: {module_name} has no function {function_name}")
    found: Callable[..., Any] = function
    return found
