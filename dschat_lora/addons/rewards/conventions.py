"""Reward functions written for verl and OpenRLHF, with arguments as those of TRL's have."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any, cast

from torch import Tensor

from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.score.user_functions import PLURAL, named_parameters, singular, takes_all

# Functions of verl get what these columns hold, or None.
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
OPENRLHF = ("queries", "prompts", "labels")
Values = Mapping[str, Any]
_OF_PLAYERS = ("environments",)
_PLURALS = {singular(name, _OF_PLAYERS): name for name in (*PLURAL, *_OF_PLAYERS)}
_OF_RUN = ("trainer_state", "log_metric", "log_extra")  # which no list holds


def of_verl(function: Callable[..., Any], tokenizer: Tokenizer) -> "Adapted | None":
    """A function of verl's, ``compute_score``, which scores one response; None for another."""
    if "solution_str" not in named_parameters(function):
        return None

    def made(given: Values) -> Values:
        by_rule = given.get("reward_model")  # where verl's data has it
        truth = by_rule if isinstance(by_rule, dict) else given
        columns = {name: given.get(name) for name in ("data_source", "extra_info")}
        own = {"solution_str": given["response"], "ground_truth": truth.get("ground_truth")}
        return {**given, **columns, **own}

    columns = ("data_source", "reward_model", "ground_truth", "extra_info")
    needed = {"response": Parameter.empty, **dict.fromkeys(columns)}
    return Adapted(function, VERL, needed, made)


def of_openrlhf(function: Callable[..., Any], tokenizer: Tokenizer) -> "Adapted | None":
    """The same of OpenRLHF's ``reward_func``: it gets lists of one, as from OpenRLHF itself.

    One that ``takes_lists``, as a server does, gets all responses at once.
    """
    if "queries" not in named_parameters(function):
        return None
    at_once = getattr(function, "takes_lists", False)

    def made(given: Values) -> Values:
        lists = given
        if not at_once:
            lists = {_PLURALS.get(n, n): v if n in _OF_RUN else [v] for n, v in given.items()}
        pairs = zip(lists["prompts"], lists["token_ids"], strict=True)
        labels = [row.get("label", row.get("answer", "")) for row in lists["rows"]]
        queries = [prompt + tokenizer.decode(ids) for prompt, ids in pairs]
        return {**lists, "queries": queries, "labels": labels}

    names = ("responses", "prompts", "token_ids", "rows")
    needed = dict.fromkeys(names if at_once else map(singular, names), Parameter.empty)
    return Adapted(function, OPENRLHF, needed, made, unwraps=not at_once)


class Adapted:
    """A function of another library's, whose signature is what its arguments are made of."""

    def __init__(
        self,
        function: Callable[..., Any],
        theirs: Collection[str],
        needed: Values,
        made: Callable[[Values], Values],
        *,
        unwraps: bool = False,
    ) -> None:
        """Take a function whose arguments ``theirs`` are made of those ``needed``.

        ``needed`` are defaults by name, ``made`` gives all, and with ``unwraps`` the function
        returns lists of one.
        """
        self._function, self._made, self._unwraps = function, made, unwraps
        own, others = named_parameters(function), takes_all(function)
        self._takes = None if others else {*own}
        logs = dict.fromkeys(("log_metric", "log_extra"), Parameter.empty)
        asked = {
            singular(n, _OF_PLAYERS): each.default for n, each in own.items() if n not in theirs
        }
        keyword = partial(Parameter, kind=Parameter.KEYWORD_ONLY)
        parameters = [keyword(n, default=v) for n, v in {**asked, **needed, **logs}.items()]
        open_to_all = [Parameter("others", Parameter.VAR_KEYWORD)] if others else []
        self.__signature__ = inspect.Signature(parameters + open_to_all)

    def __getattr__(self, name: str) -> object:
        return getattr(self._function, name)

    def __call__(self, **given: Any) -> object:
        """The scores, without what the function returns beside them, which is logged."""
        made = self._made(given)
        takes = made if self._takes is None else self._takes
        returned = self._function(**{name: v for name, v in made.items() if name in takes})
        if not inspect.isawaitable(returned):
            return self._scores(returned, given)

        async def awaited() -> object:
            return self._scores(await returned, given)

        return awaited()

    def _scores(self, returned: object, given: Values) -> object:
        by_name = returned if isinstance(returned, dict) else {}
        scores = by_name.get("score", by_name.get("rewards"))
        if scores is None:
            scores = returned
        else:
            own = ("score", "rewards", "scores", "extra_logs")
            more = {name: value for name, value in by_name.items() if name not in own}
            count = len(given["responses"]) if "responses" in given else 1
            for name, value in {**more, **(by_name.get("extra_logs") or {})}.items():
                value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
                if isinstance(value, int | float):
                    given["log_metric"](name, value)
                    continue
                is_column = isinstance(value, list | tuple | Tensor) and len(value) == count
                given["log_extra"](name, list(value) if is_column else [value] * count)
        if self._unwraps and hasattr(scores, "__len__") and len(scores) == 1:
            (scores,) = cast(Iterable[object], scores)
        return scores
