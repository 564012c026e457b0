"""Scores of responses: who gives them, their weighted sum, and the rewards that are made of it."""

import math
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, soft_overlong_punishment
from dschat_lora.algos.segments import to_device
from dschat_lora.engine.distributed import (
    device,
    raise_together,
    rank,
    sum_over_processes,
    world_size,
)
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.options.config import RewardsConfig, RlhfConfig, check_weights
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Beside, Response
from dschat_lora.rl.score.user_functions import (
    RewardError,
    RewardLog,
    TrainerState,
    UserFunction,
    find_function,
    named_parameters,
    shortened,
    takes_all,
)

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
    # gives the (N,) total by an experience with log-probabilities; None: it is known
    once_known: Callable[[Any], Tensor] | None = None


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
        own = getattr(self.function, "reward_name", "")
        return self.own_names or (own or self.name.partition("=")[0].rpartition(":")[2],)

    def entries(self, returned: object, count: int) -> list[Any]:
        """Of a scorer's lists by name, the scores of each response."""
        names = self.own_names
        if not names:
            return super().entries(returned, count)
        known = returned if isinstance(returned, Mapping) else None
        if known is None or not {*known} <= {*names}:
            what = f"a {type(returned).__name__}" if known is None else sorted(known)
            raise ValueError(
                f"--{self.option} {self.name} returned {what}; it must return scores of the "
                f"responses by its names {', '.join(names)}"
            )
        none, of = [None] * count, super().entries
        lists = (none if known.get(n) is None else of(known[n], count) for n in names)
        return list(zip(*lists, strict=True))

    def __call__(
        self,
        responses: Sequence[Response],
        state: TrainerState | None = None,
        beside: Beside | None = None,
    ) -> Tensor:
        """(N, K) fp32 scores by the K names, NaN for None; each rank scores some. On every rank.

        No response is scored twice, whatever the ranks hold: a function may answer differently.
        With something ``beside`` responses each rank scores those of which it has that.

        Raises:
            ValueError: if the function returns something else.
        """
        mine: Collection[int] = () if beside is None else beside.by_place
        if beside is None:
            by_group = self.batch == "group"
            places = [each.group if by_group else n for n, each in enumerate(responses)]
            mine = {n for n, place in enumerate(places) if place % world_size() == rank()}
        own = {n: r for n, r in enumerate(responses) if n in mine and not r.episode.failure}
        more = {} if beside is None else {beside.name: [beside.by_place[n] for n in own]}
        # One rank's failure is everybody's: the first rank says what it was.
        values = raise_together(lambda: self._scores([*own.values()], state, more))
        table, unscored = dict(zip(own, values, strict=True)), [0.0] * len(self.names)
        rows = (table.get(n, unscored) for n in range(len(responses)))
        flat = sum_over_processes([score for scores in rows for score in scores])
        return torch.tensor(flat, device=device()).float().view(-1, len(self.names))

    def own_scores(self, responses: Sequence[Response]) -> list[float]:
        """Scores of responses of this process by its only name, NaN for None.

        Raises:
            ValueError: if the function returns something else.
        """
        return [score for (score,) in self._scores(responses)]

    def _scores(
        self,
        responses: Sequence[Response],
        state: TrainerState | None = None,
        beside: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[list[float]]:
        calls: dict[int, list[int]] = {}
        for number, response in enumerate(responses):
            calls.setdefault(response.group if self.batch == "group" else 0, []).append(number)
        scores: dict[int, list[float]] = {}
        for numbers in calls.values():
            more = {name: [own[n] for n in numbers] for name, own in (beside or {}).items()}
            entries = self.call([responses[n] for n in numbers], state, more)
            for n, entry in zip(numbers, entries, strict=True):
                values = entry if self.own_names else [entry]
                scores[n] = [self._number(value, responses[n]) for value in values]
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
                f"{prompt!r}; scores are finite numbers, or None to exclude a response (they are "
                "stored in fp32, up to 3.4e38)"
            )
        return number


@dataclass(frozen=True)
class RewardFunctions:
    """Functions that score every response; each process calls them with some."""

    functions: tuple[RewardFunction, ...]
    log: RewardLog = field(default_factory=RewardLog)  # of all functions
    beside: Beside | None = None  # what they may ask for
    taken: tuple[str, ...] = (REWARD_MODEL,)  # names of other rewards

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the functions, those of one name numbered from the second on."""
        labels: list[str] = []
        for name in (name for each in self.functions for name in each.names):
            label, number = name, 2
            while label in (*labels, *self.taken):
                label, number = f"{name}_{number}", number + 1
            labels.append(label)
        return tuple(labels)

    @property
    def logs(self) -> bool:
        """Whether a function may log anything, by its parameters."""
        called, loggers = [each.function for each in self.functions], {"log_extra", "log_metric"}
        return any(takes_all(each) or loggers & named_parameters(each).keys() for each in called)

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse functions that ask for columns which the data lacks."""
        more = () if self.beside is None else (self.beside.name, self.beside.name.removesuffix("s"))
        for each in self.functions:
            each.check_columns({*columns, *more})

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores; call on every rank.

        Raises:
            RewardError: if a function fails or returns something else than scores.
        """
        try:
            tables = [each(responses, state, self.beside) for each in self.functions]
        except Exception as error:
            raise RewardError from error
        columns = [column for each in tables for column in each.unbind(1)]
        by_name = dict(zip(self.names, columns, strict=True))
        total = weighted_sum(by_name, dict.fromkeys(by_name, 1.0))
        return Scores(total, by_name, {}, *(self.log.take(responses) if self.logs else ({}, {})))


@dataclass(frozen=True)
class EpisodeScorer(Scorer):
    """What the player gave, and what it logged beside that."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """That of what the player gives."""
        return (self.name,)

    def __call__(self, responses: Sequence[Response], state: TrainerState) -> Scores:
        """The scores; NaN where none was given."""
        given = [each.episode.reward for each in responses]
        values = [math.nan if reward is None else reward for reward in given]
        scores = to_device(torch.tensor(values), device())
        logged = [each.episode.logged for each in responses]
        names = sorted({name for each in logged for name in each})
        columns = {name: [each.get(name) for each in logged] for name in names}
        known = {n: [v for v in column if v is not None] for n, column in columns.items()}
        metrics = {name: sum(values) / len(values) for name, values in known.items()}
        return Scores(scores, {self.name: scores}, metrics=metrics, columns=columns)


@dataclass(frozen=True)
class RewardSum(Scorer):
    """The weighted sum of what scorers give."""

    scorers: tuple[Scorer, ...]
    weights: Mapping[str, float]  # by name, in the order in which they are summed
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
        parts = [scorer(responses, state) for scorer in self.scorers]
        by_name = {
            name: scores.masked_fill(left_out, torch.nan)
            for each in parts
            for name, scores in each.by_name.items()
        }
        total = weighted_sum(by_name, self.weights)
        model = by_name.get(REWARD_MODEL, torch.zeros_like(total))
        known = torch.stack([model, total], dim=1).tolist()  # read at once
        for response, (own, added) in zip(responses, known, strict=True):
            is_sum = math.isfinite(own)
            # A NaN of another origin is a function's None, or of a response that is left out.
            if response.is_left_out or (is_sum and not math.isinf(added)):
                continue
            who, value = (
                ("the weighted sum of rewards", added) if is_sum else ("the reward model", own)
            )
            raise ScoreError from ValueError(
                f"{who} gives {value} for {shortened(self.decode(response.tokens))!r} after the "
                f"prompt {shortened(self.decode(response.prompt))!r}; a score must be a finite "
                "number"
            )
        return Scores(
            total,
            by_name,
            self.weights,
            metrics={name: value for each in parts for name, value in each.metrics.items()},
            columns={name: column for each in parts for name, column in each.columns.items()},
        )


@dataclass(frozen=True)
class Scoring:
    """What says how good responses are: to learn from, and to look at."""

    scorer: Scorer  # to which the reward model is added, if there is one
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
    beside: Beside | None,
) -> Scoring:
    """What scores by the options; ``episodes`` and ``beside`` are those of :func:`load_scorer`.

    Raises:
        ValueError: if something cannot be used, or nothing scores.
    """
    name = config.rewards.judge_function
    judge = None if name is None else load_function("judge_function", name, tokenizer)
    has_model = config.critic.model_name_or_path is not None
    scorer = load_scorer(
        config.rewards, tokenizer, has_model=has_model, episodes=episodes, beside=beside
    )
    if scorer.weights:
        return Scoring(scorer, judge)
    if config.reference is not None:
        return Scoring(cast(Scorer, config.reference.scorer()), judge)
    raise ValueError("there is no reward: give --reward_function or a reward model")


def load_scorer(
    config: RewardsConfig,
    tokenizer: Tokenizer,
    *,
    has_model: bool,
    episodes: str | None = None,
    beside: Beside | None = None,
) -> RewardSum:
    """The functions of ``--reward_function`` with their weights.

    With ``has_model`` the reward model is to be added, which :meth:`RewardSum.adding` does.
    ``episodes`` is the name of the reward that the player gives, and ``beside`` what it keeps for
    functions.

    Raises:
        ValueError: if one cannot be used.
    """
    log, batch = RewardLog(), config.reward_batch
    calls = {"retries": config.reward_retries, "timeout": config.reward_timeout}
    functions = tuple(
        load_function("reward_function", name, tokenizer, log=log, batch=batch, **calls)
        for name in config.reward_function
    )
    taken = () if episodes is None else (episodes,)
    scorer = RewardFunctions(functions, log, beside, (*taken, REWARD_MODEL))
    count = len(scorer.names)
    weights = config.reward_weights or (1.0,) * count
    check_weights(weights, count, has_model=has_model)
    of_model = {REWARD_MODEL: (*weights[count:], 1.0)[0]} if has_model else {}
    return RewardSum(
        (*((scorer,) if functions else ()), *map(EpisodeScorer, taken)),
        of_model | dict(zip(scorer.names, weights, strict=False)) | dict.fromkeys(taken, 1.0),
        tokenizer.decode,
    )


def load_function(option: str, name: str, tokenizer: Tokenizer, **calls: Any) -> RewardFunction:
    """The function or scorer behind ``module:name``; the module is imported, nothing is evaluated.

    ``calls`` are fields of :class:`RewardFunction`: how it is called.

    Raises:
        ValueError: if there is none, or it takes no responses.
    """
    scorer = RewardFunction(
        option, name, find_function(option, name, tokenizer), tokenizer, **calls
    )
    names = scorer.names
    if not all(isinstance(each, str) and each for each in names) or len({*names}) < len(names):
        raise ValueError(f"--{option} {name} has the names {names}: the names must differ")
    if len(names) > 1 and option == "judge_function":
        raise ValueError(f"--{option} {name} gives {len(names)} rewards; a judge must return one")
    return scorer


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
