"""Reward functions: scores of responses, and their weighted sum."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dschat_lora.engine.distributed import raise_together, rank, sum_over_processes, world_size
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.options.names import is_remote
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.user_functions import (
    RewardError,
    RewardLog,
    TrainerState,
    UserFunction,
    find_function,
    named_parameters,
    one_at_a_time,
    takes_all,
)


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
        if is_remote(self.name):
            return self.name.rstrip("/").rpartition("/")[2]
        return self.name.partition(":")[2].partition("=")[0]

    def value_of(self, found: Any, responses: Sequence[Response], log: RewardLog) -> Any:
        """The scores; of a dict, as from verl's and OpenRLHF's functions, the rest is logged."""
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

    def __call__(
        self,
        responses: Sequence[Response],
        device: torch.device,
        state: TrainerState | None = None,
        objects: Mapping[int, Any] | None = None,
    ) -> Tensor:
        """(N,) fp32 scores on every rank, NaN for None; each rank scores some. On every rank.

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
        scores = [0.0] * len(responses)
        for number, value in zip(mine, values, strict=True):
            scores[number] = value
        return torch.tensor(sum_over_processes(scores), device=device).float()

    def own_scores(self, responses: Sequence[Response]) -> list[float]:
        """Scores of responses of this process, NaN for None.

        Raises:
            ValueError: if the function returns something else.
        """
        return self._scores(list(responses), by_group=False, state=None)

    def _scores(
        self,
        responses: list[Response],
        *,
        by_group: bool,
        state: TrainerState | None,
        objects: Sequence[Any] | None = None,
    ) -> list[float]:
        scores: dict[int, float] = {}
        for group in dict.fromkeys(each.group if by_group else 0 for each in responses):
            chosen = [n for n, r in enumerate(responses) if not by_group or r.group == group]
            part = [responses[n] for n in chosen]
            found = self.call(part, state, objects and [objects[n] for n in chosen])
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
    log: RewardLog = field(default_factory=RewardLog)  # of all functions
    environment: str | None = None  # the name of the reward that an environment gives, if any
    objects: Mapping[int, Any] | None = None  # a stateful environment's, by number of the response
    gates: tuple[RewardFunction, ...] = ()  # where one scores 0 or less, the sum is at most 0

    @property
    def logs(self) -> bool:
        """Whether a function may log anything, by its parameters."""
        return any(
            takes_all(each.function)
            or not {"log_extra", "log_metric", "solution_str", "queries"}.isdisjoint(
                named_parameters(each.function)
            )
            for each in (*self.functions, *self.gates)
        )

    def __call__(
        self, responses: Sequence[Response], device: torch.device, state: TrainerState | None = None
    ) -> dict[str, Tensor]:
        """(N,) scores on every rank by the function's name, not weighted; call on every rank.

        Raises:
            RewardError: if a function fails or returns something else than scores.
        """
        try:
            return {
                label: each(responses, device, state, self.objects)
                for label, each in self.by_label().items()
            }
        except Exception as error:
            raise RewardError from error

    def total(self, rewards: "dict[str, Tensor]", model: Tensor | None) -> Tensor:
        """(N,) weighted sum of the functions' scores and the reward ``model``'s, if there is one.

        A function's NaN is left out; the sum is NaN where nothing else came. Where a gate is
        closed it is at most 0.
        """
        labels = list(self.by_label())
        weights = dict(zip(labels, self.weights, strict=False))
        if self.environment is not None:
            weights[self.environment] = 1.0
        total = torch.zeros_like(next(iter(rewards.values())))
        scored = torch.zeros_like(total, dtype=torch.bool)
        if model is not None:
            total, scored = self.model_weight * model, ~scored
        for label, weight in weights.items():
            missing = rewards[label].isnan()
            total = total + torch.where(missing, 0, weight * rewards[label])
            scored = scored | ~missing
        for label in labels[len(self.functions) :]:
            total = torch.where(rewards[label] <= 0, total.clamp(max=0), total)
        return total.masked_fill(~scored, torch.nan)

    def by_label(self) -> dict[str, RewardFunction]:
        """The functions by name, those of one name numbered from the second on."""
        found: dict[str, RewardFunction] = {}
        for each in (*self.functions, *self.gates):
            label, number = each.label, 2
            while label in (*found, self.environment, "reward_model"):
                label, number = f"{each.label}_{number}", number + 1
            found[label] = each
        return found


def load_functions(config: RewardsConfig, tokenizer: Tokenizer) -> RewardFunctions:
    """The functions of ``--reward_function`` with their weights, and those of ``--reward_gate``.

    Raises:
        ValueError: if one cannot be used.
    """
    log = RewardLog()
    functions, gates = (
        tuple(
            load_function(
                option,
                name,
                tokenizer,
                batch=config.reward_batch,
                retries=config.reward_retries,
                timeout=config.reward_timeout,
                log=log,
            )
            for name in getattr(config, option)
        )
        for option in ("reward_function", "reward_gate")
    )
    weights = config.reward_weights or (1.0,) * len(functions)
    return RewardFunctions(
        functions,
        weights[: len(functions)],
        weights[len(functions)] if len(weights) > len(functions) else 1.0,
        log,
        gates=gates,
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
    """The function behind ``module:function``; the module is imported, nothing is evaluated.

    Raises:
        ValueError: if there is no such function, or it takes no responses.
    """
    function = find_function(option, name)
    log = log or RewardLog()
    return RewardFunction(option, name, function, tokenizer, batch, retries, timeout, log)
