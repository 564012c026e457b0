"""Reward functions: scores of responses, and their weighted sum."""

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dschat_lora.engine.distributed import (
    device,
    raise_together,
    rank,
    sum_over_processes,
    world_size,
)
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.options.config import RewardsConfig, RlhfConfig, check_weights
from dschat_lora.rl.options.names import is_remote
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import (
    REWARD_MODEL,
    EpisodeScorer,
    RewardSum,
    Scorer,
    Scores,
    TeacherScorer,
    weighted_sum,
)
from dschat_lora.rl.score.user_functions import (
    RewardError,
    RewardLog,
    TrainerState,
    UserFunction,
    find_function,
    named_parameters,
    one_at_a_time,
    shortened,
    takes_all,
)


@dataclass(frozen=True)
class RewardFunction(UserFunction):
    """A user's function that scores responses.

    It returns a list of as many numbers, or None for a response that is not to count; a number
    where it takes one response at a time. One with ``names``, a :class:`Scorer`, returns such a
    list, or a tensor, by each of its names.
    """

    noun, entry = "scores", "one number, or None"

    @cached_property
    def own_names(self) -> tuple[str, ...]:
        """Those that a scorer has; empty for a function."""
        return tuple(getattr(self.function, "names", ()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of its rewards in metrics."""
        if self.own_names:
            return self.own_names
        if is_remote(self.name):
            return (self.name.rstrip("/").rpartition("/")[2],)
        return (self.name.partition(":")[2].partition("=")[0],)

    def value_of(self, found: Any, responses: Sequence[Response], log: RewardLog) -> Any:
        """The scores; of a dict, as from verl's and OpenRLHF's functions, the rest is logged."""
        if self.own_names:
            return found
        scores = found.get("score", found.get("rewards")) if isinstance(found, dict) else None
        if scores is not None:
            own = ("score", "rewards", "scores", "extra_logs")
            more = {name: value for name, value in found.items() if name not in own}
            for name, value in {**more, **(found.get("extra_logs") or {})}.items():
                value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
                if isinstance(value, int | float):
                    log.log_metric(name, value)
                elif isinstance(value, list | tuple | Tensor) and len(value) == len(responses):
                    log.log_extra(responses, name, list(value))
                else:
                    log.log_extra(responses, name, [value] * len(responses))
            found = scores
        # OpenRLHF's functions return lists of one.
        lists = "queries" in named_parameters(self.function) and one_at_a_time(self.function)
        return found[0] if lists and hasattr(found, "__len__") and len(found) == 1 else found

    def entries(self, found: Any, count: int) -> list[Any]:
        """Of a scorer's lists by name, the scores of each response."""
        names = self.own_names
        if not names:
            return super().entries(found, count)
        if not isinstance(found, Mapping) or not {*found} <= {*names}:
            what = sorted(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise ValueError(
                f"--{self.option} {self.name} returned {what}; it must return scores of the "
                f"responses by its names {', '.join(names)}"
            )
        lists = []
        for name in names:
            given = found.get(name)
            lists.append([None] * count if given is None else super().entries(given, count))
        return list(zip(*lists, strict=True))

    def __call__(
        self,
        responses: Sequence[Response],
        state: TrainerState | None = None,
        objects: Mapping[int, Any] | None = None,
    ) -> Tensor:
        """(N, K) fp32 scores by the K names, NaN for None; each rank scores some. On every rank.

        No response is scored twice, whatever the ranks hold: a function may answer differently.
        With ``objects`` of a stateful environment each rank scores the responses whose it holds.

        Raises:
            ValueError: if the function returns something else.
        """
        by_group = self.batch == "group"
        places = [each.group if by_group else n for n, each in enumerate(responses)]
        mine = [n for n, place in enumerate(places) if place % world_size() == rank()]
        if objects is not None:
            mine = [n for n in range(len(responses)) if n in objects]
        mine = [n for n in mine if not responses[n].episode.failure]
        own = [responses[n] for n in mine]
        # One rank's failure is everybody's: the first rank says what it was.
        made = None if objects is None else [objects[n][0] for n in mine]
        values = raise_together(
            lambda: self._scores(own, by_group=by_group, state=state, objects=made)
        )
        count = len(self.names)
        scores = [0.0] * (len(responses) * count)
        for number, value in zip(mine, values, strict=True):
            scores[number * count : (number + 1) * count] = value
        found = torch.tensor(sum_over_processes(scores), device=device()).float()
        return found.view(len(responses), count)

    def own_scores(self, responses: Sequence[Response]) -> list[float]:
        """Scores of responses of this process by its only name, NaN for None.

        Raises:
            ValueError: if the function returns something else.
        """
        return [score for (score,) in self._scores(list(responses), by_group=False, state=None)]

    def _scores(
        self,
        responses: list[Response],
        *,
        by_group: bool,
        state: TrainerState | None,
        objects: Sequence[Any] | None = None,
    ) -> list[list[float]]:
        scores: dict[int, list[float]] = {}
        for group in dict.fromkeys(each.group if by_group else 0 for each in responses):
            chosen = [n for n, r in enumerate(responses) if not by_group or r.group == group]
            part = [responses[n] for n in chosen]
            found = self.call(part, state, objects and [objects[n] for n in chosen])
            for number, entry, response in zip(chosen, found, part, strict=True):
                values = entry if self.own_names else [entry]
                scores[number] = [self._number(value, response) for value in values]
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


@dataclass(frozen=True)
class RewardFunctions:
    """Functions that score every response; each process calls them with some."""

    functions: tuple[RewardFunction, ...]
    log: RewardLog = field(default_factory=RewardLog)  # of all functions
    objects: Mapping[int, Any] | None = None  # a stateful environment's, by number of the response
    taken: tuple[str, ...] = (REWARD_MODEL,)  # names of other rewards

    @property
    def names(self) -> tuple[str, ...]:
        """Of the functions, those of one name numbered from the second on."""
        found: list[str] = []
        for name in (name for each in self.functions for name in each.names):
            label, number = name, 2
            while label in (*found, *self.taken):
                label, number = f"{name}_{number}", number + 1
            found.append(label)
        return tuple(found)

    @property
    def logs(self) -> bool:
        """Whether a function may log anything, by its parameters."""
        return any(
            takes_all(each.function)
            or not {"log_extra", "log_metric", "solution_str", "queries"}.isdisjoint(
                named_parameters(each.function)
            )
            for each in self.functions
        )

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse functions that ask for columns which the data lacks."""
        objects = set() if self.objects is None else {"environments", "environment"}
        for each in self.functions:
            each.check_columns({*columns, *objects})

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores; call on every rank.

        Raises:
            RewardError: if a function fails or returns something else than scores.
        """
        try:
            tables = [each(responses, state, self.objects) for each in self.functions]
        except Exception as error:
            raise RewardError from error
        columns = [column for each in tables for column in each.unbind(1)]
        by_name = dict(zip(self.names, columns, strict=True))
        total = weighted_sum(by_name, dict.fromkeys(by_name, 1.0))
        return Scores(total, by_name, {}, *(self.log.take(responses) if self.logs else ({}, {})))


@dataclass(frozen=True)
class Scoring:
    """What says how good responses are: to learn from, and to look at."""

    scorer: RewardSum | TeacherScorer  # to which the reward model is added, if there is one
    judge: RewardFunction | None  # of evaluations

    @property
    def asks(self) -> tuple[Scorer | RewardFunction, ...]:
        """What may refuse the columns of the data."""
        return (self.scorer,) if self.judge is None else (self.judge, self.scorer)


def load_scoring(
    config: RlhfConfig,
    tokenizer: Tokenizer,
    *,
    episodes: str | None,
    objects: Mapping[int, Any] | None,
) -> Scoring:
    """What scores by the options; ``episodes`` and ``objects`` are those of :func:`load_scorer`.

    Raises:
        ValueError: if something cannot be used, or nothing scores.
    """
    rewards, has_model = config.rewards, config.critic.model_name_or_path is not None
    name = rewards.judge_function
    judge = None if name is None else load_function("judge_function", name, tokenizer)
    if rewards.reward_function or episodes is not None or has_model:
        return Scoring(
            load_scorer(
                rewards, tokenizer, has_model=has_model, episodes=episodes, objects=objects
            ),
            judge,
        )
    if config.ppo.rules.distills:
        return Scoring(TeacherScorer(), judge)
    raise ValueError(
        f"--environment {config.batch.environment} gives no reward (a class may, by get_reward "
        "or step), and neither --reward_function nor --critic_model_name_or_path does"
    )


def load_scorer(
    config: RewardsConfig,
    tokenizer: Tokenizer,
    *,
    has_model: bool,
    episodes: str | None = None,
    objects: Mapping[int, Any] | None = None,
) -> RewardSum:
    """The functions of ``--reward_function`` with their weights, and those of ``--reward_gate``.

    With ``has_model`` the reward model is to be added, which :meth:`RewardSum.adding` does.
    ``episodes`` is the name of the reward that an environment or agent gives, and ``objects`` are
    those of a stateful environment.

    Raises:
        ValueError: if one cannot be used.
    """
    log = RewardLog()
    functions = tuple(
        load_function(
            option,
            name,
            tokenizer,
            batch=config.reward_batch,
            retries=config.reward_retries,
            timeout=config.reward_timeout,
            log=log,
        )
        for option in ("reward_function", "reward_gate")
        for name in getattr(config, option)
    )
    own = () if episodes is None else (EpisodeScorer(episodes),)
    taken = tuple(name for each in own for name in each.names)
    scorer = RewardFunctions(functions, log, objects, (*taken, REWARD_MODEL))
    count = sum(len(each.names) for each in functions if each.option == "reward_function")
    scored, gates = scorer.names[:count], scorer.names[count:]
    weights = config.reward_weights or (1.0,) * count
    check_weights(weights, count, has_model=has_model)
    of_model = {REWARD_MODEL: (*weights[count:], 1.0)[0]} if has_model else {}
    return RewardSum(
        (*((scorer,) if functions else ()), *own),
        {**of_model, **dict(zip(scored, weights, strict=False)), **dict.fromkeys(taken, 1.0)},
        gates,
        tokenizer.decode,
    )


def load_function(
    option: str,
    name: str,
    tokenizer: Tokenizer,
    *,
    batch: str = "all",
    retries: int = 0,
    timeout: float = 0.0,
    log: RewardLog | None = None,
) -> RewardFunction:
    """The function or scorer behind ``module:name``; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is none, or it takes no responses.
    """
    function = find_function(option, name)
    log = log or RewardLog()
    found = RewardFunction(option, name, function, tokenizer, batch, retries, timeout, log)
    names = found.names
    if not all(isinstance(each, str) and each for each in names) or len({*names}) < len(names):
        raise ValueError(f"--{option} {name} has the names {names}: give texts that differ")
    if len(names) > 1 and option == "judge_function":
        raise ValueError(f"--{option} {name} gives {len(names)} rewards; a judge gives one")
    return found
