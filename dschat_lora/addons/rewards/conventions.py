"""Reward functions written for verl and OpenRLHF, as functions that score one response."""

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

from dschat_lora.addons.rewards.external import RemoteReward, logged_scores
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.score.user_functions import PLURAL, named_parameters, singular, takes_all

# Functions of verl get what these columns hold, or None.
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENRLHF = ("queries", "prompts", "labels")
_PLURALS = {singular(name): name for name in PLURAL}
_OF_RUN = ("trainer_state", "log_metric", "log_extra")  # which no list holds


def of_verl(function: Callable[..., Any], tokenizer: Tokenizer) -> Callable[..., Any] | None:
    """A function of verl's, ``compute_score``, in the form of one of TRL's; None for another."""
    return _OfVerl(function) if "solution_str" in named_parameters(function) else None


def of_openrlhf(function: Callable[..., Any], tokenizer: Tokenizer) -> Callable[..., Any] | None:
    """The same of OpenRLHF's ``reward_func``, or of a server that is asked as by OpenRLHF."""
    if isinstance(function, RemoteReward):
        return replace(function, decode=tokenizer.decode)
    is_theirs = "queries" in named_parameters(function)
    return _OfOpenRlhf(function, tokenizer) if is_theirs else None


class _Function:
    """A function of another library's, whose signature is what it needs of this one's."""

    def __init__(
        self, function: Callable[..., Any], theirs: Collection[str], needed: Mapping[str, Any]
    ) -> None:
        """Take a function with the arguments ``theirs``, which are made of those ``needed``.

        ``needed`` are defaults by name, ``Parameter.empty`` where there is none.
        """
        self._function, self._takes_all = function, takes_all(function)
        own = named_parameters(function)
        self._takes = {*own}
        asked = {singular(n): each.default for n, each in own.items() if n not in theirs}
        asked = {**asked, **needed, "log_metric": Parameter.empty, "log_extra": Parameter.empty}
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in asked.items()
        ]
        if self._takes_all:
            parameters.append(Parameter("others", Parameter.VAR_KEYWORD))
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, **given: Any) -> Any:
        """What the function returns for a response, without what it logs beside scores."""
        arguments = self._arguments(given)
        if not self._takes_all:
            arguments = {name: v for name, v in arguments.items() if name in self._takes}
        found = self._function(**arguments)
        return (
            self._awaited(found, given) if inspect.isawaitable(found) else self._one(found, given)
        )

    async def _awaited(self, found: Awaitable[Any], given: Mapping[str, Any]) -> Any:
        return self._one(await found, given)

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _one(self, found: Any, given: Mapping[str, Any]) -> Any:
        return logged_scores(found, 1, given["log_metric"], given["log_extra"])


class _OfVerl(_Function):
    """One of verl's: text, ground truth and what else its data has of a row."""

    def __init__(self, function: Callable[..., Any]) -> None:
        columns = ("data_source", "reward_model", "ground_truth", "extra_info")
        needed = {"response": Parameter.empty, **dict.fromkeys(columns)}
        super().__init__(function, VERL, needed)

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        by_rule = given.get("reward_model")  # where verl's data has it
        truth = by_rule if isinstance(by_rule, dict) else given
        return {
            **given,
            "solution_str": given["response"],
            "data_source": given.get("data_source"),
            "ground_truth": truth.get("ground_truth"),
            "extra_info": given.get("extra_info"),
        }


class _OfOpenRlhf(_Function):
    """One of OpenRLHF's, which gets lists of one, as from OpenRLHF itself."""

    def __init__(self, function: Callable[..., Any], tokenizer: Tokenizer) -> None:
        names = ("response", "prompt", "token_ids", "row")
        super().__init__(function, OPENRLHF, dict.fromkeys(names, Parameter.empty))
        self._decode = tokenizer.decode

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        prompt, row = given["prompt"], given["row"]
        lists = {_PLURALS.get(n, n): [v] for n, v in given.items() if n not in _OF_RUN}
        return {
            **lists,
            **{name: given[name] for name in _OF_RUN if name in given},
            "queries": [prompt + self._decode(given["token_ids"])],
            "prompts": [prompt],
            "labels": [row.get("label", row.get("answer", ""))],
        }

    def _one(self, found: Any, given: Mapping[str, Any]) -> Any:
        scores = super()._one(found, given)
        return scores[0] if hasattr(scores, "__len__") and len(scores) == 1 else scores
