"""Parts of an iteration beside drawing, scoring and learning: coefficients that adapt, and logs."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, repeat
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dschat_lora.algos.advantages import response_sums
from dschat_lora.algos.kl import adapted_kl_coef
from dschat_lora.data.media import MediaReader, has_media
from dschat_lora.engine.distributed import rank
from dschat_lora.report.appended_file import AppendedFile
from dschat_lora.report.rollout_file import as_member
from dschat_lora.rl.learn.experience import AdvantagesAndReturns, Experience, StepResult
from dschat_lora.rl.loop.schedule import RlhfProgress
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import messages_after_prompt

if TYPE_CHECKING:
    from dschat_lora.models.average import MovingAverage

# Responses of an iteration whose advantages, KL and values are kept token by token.
ROWS_BY_TOKEN = 4


CALLED = ("after_step", "after_iteration", "before_checkpoint")


class Part(Protocol):
    """What follows optimizer steps and iterations, on every rank; it may leave out any method.

    One whose ``after_step`` looks at results alone says ``takes_steps_late = True``: on a GPU it is
    told of an iteration's steps at their end, and the GPU does not wait between them.

    Parts with ``state()`` and ``restore(state)`` are of the run's checkpoints, by their name. An
    add-on's are made by ``made_parts(setup, progress)`` of its options.
    """

    name: str

    def after_step(self, result: StepResult) -> None:
        """After an optimizer step."""

    def after_iteration(
        self, experience: Experience, targets: AdvantagesAndReturns | None
    ) -> Mapping[str, float] | None:
        """After the steps of an iteration, whose metrics those that are returned are among.

        ``targets`` is None where no step was taken, as no response counts.
        """

    def before_checkpoint(self) -> None:
        """Before a checkpoint is written."""

    def after_log(self, metrics: Mapping[str, Any]) -> Sequence[str]:
        """Warnings of an iteration, once its metrics are in the log; of an add-on's part."""

    def after_evaluation(self, metrics: Mapping[str, Any]) -> Sequence[str]:
        """Warnings of an evaluation on held-out prompts; of an add-on's part."""

    def stopped_by(self) -> str:
        """The option that ends the run with a checkpoint; empty: it goes on. An add-on's part."""


class Parts:
    """All parts of a run, in order; call methods on every rank."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._failure: UserFunctionError | None = None

    def _having(self, method: str) -> list[Any]:
        return [part for part in self._parts if hasattr(part, method)]

    @property
    def take_steps_late(self) -> bool:
        """Whether each may be told of a step when further ones have changed the weights."""
        return all(getattr(each, "takes_steps_late", False) for each in self._having("after_step"))

    def after_step(self, result: StepResult) -> None:
        """Tell each of an optimizer step."""
        for part in self._having("after_step"):
            part.after_step(result)

    def after_iteration(
        self, experience: Experience, targets: AdvantagesAndReturns | None
    ) -> dict[str, float]:
        """Tell each of an iteration; their metrics."""
        metrics: dict[str, float] = {}
        for part in self._having("after_iteration"):
            try:
                metrics |= part.after_iteration(experience, targets) or {}
            except UserFunctionError as error:
                self._failure = error
        return metrics

    def check_names(self, taken: Collection[str]) -> None:
        """Refuse metrics of an add-on's part that have a name which is ``taken``."""
        for part in self._having("check_names"):
            part.check_names(taken)

    def warnings(self, moment: str, metrics: Mapping[str, Any]) -> list[str]:
        """Those ``after_log`` or ``after_evaluation``."""
        return [text for part in self._having(moment) for text in getattr(part, moment)(metrics)]

    def stopped_by(self) -> str:
        """The option of a part that ends the run; empty where none does."""
        asked = [part.stopped_by() for part in self._having("stopped_by")]  # each asks all ranks
        return next(filter(None, asked), "")

    def check(self) -> None:
        """Raise what failed of the user's, once the iteration is in the log.

        Raises:
            UserFunctionError: naming the part.
        """
        if self._failure is not None:
            raise self._failure

    def before_checkpoint(self, _: int) -> None:
        """Tell each that a checkpoint of a step is to be written."""
        for part in self._having("before_checkpoint"):
            part.before_checkpoint()

    def stateful(self) -> dict[str, Any]:
        """Those with a state that is JSON, by name."""
        return {part.name: part for part in self._having("restore")}

    def averages(self) -> dict[str, "MovingAverage"]:
        """Those that keep tensors of the actor, by name."""
        return {part.name: part for part in self._having("tensors")}


@dataclass
class KlControl:
    """Measures the divergence from the reference, and steers ``kl_coef`` where it has a target."""

    name = "kl_control"
    takes_steps_late = True
    config: PpoConfig
    progress: RlhfProgress  # with the state
    _actor_learns: bool = False

    def after_step(self, result: StepResult) -> None:
        self._actor_learns = "actor" in result.outcomes

    def after_iteration(
        self, experience: Experience, targets: AdvantagesAndReturns | None
    ) -> dict[str, float]:
        if targets is None:
            return {}
        progress, config = self.progress, self.config
        kl = response_sums(experience.kl(), experience.mask)[experience.counts]
        progress.kl_spent = float(kl.double().mean())
        if config.adaptive_kl_target and self._actor_learns and math.isfinite(progress.kl_spent):
            progress.kl_coef = adapted_kl_coef(
                progress.kl_coef,
                kl=progress.kl_spent,
                target=config.adaptive_kl_target,
                horizon=config.kl_horizon,
                num_samples=len(experience.responses),
            )
        return {"kl_coef": progress.kl_coef}


class RolloutLog:
    """Writes the first ``most`` responses of each iteration to ``file``, on the first rank."""

    name = "rollouts"

    def __init__(
        self,
        file: AppendedFile,
        decode: Callable[..., str],
        *,
        most: int,
        iteration: Callable[[], int],
        media: MediaReader | None = None,
    ) -> None:
        self._media = media
        self._file, self._decode, self._most, self._iteration = file, decode, most, iteration
        self.state, self.restore, self.before_checkpoint = file.state, file.restore, file.sync

    def after_iteration(self, experience: Experience, targets: AdvantagesAndReturns | None) -> None:
        """Append an iteration's responses."""
        if self._most and rank() == 0:
            iteration = self._iteration()
            rows = rollout_rows(
                experience, targets, self._decode, iteration=iteration, most=self._most
            )
            for row, response in zip(rows, experience.responses, strict=False):
                if self._media is not None and has_media(response.prompt):
                    row["media"] = self._media.described(response.prompt)
            self._file.append(as_member(rows))


def rollout_rows(
    experience: Experience,
    targets: AdvantagesAndReturns | None,
    decode: Callable[..., str],
    *,
    iteration: int,
    most: int,
) -> list[dict[str, Any]]:
    """The first ``most`` responses for :func:`dschat_lora.report.rollout_file.as_member`.

    The advantage is the mean over a response's tokens. What is not known, such as the reward of a
    response that does not count, is None. The first few have advantage, KL and value of each of the
    actor's tokens under ``token_advantage`` and so on, beside ``tokens``.
    """
    count = min(most, len(experience.responses))
    lengths = experience.mask.sum(1).clamp(min=1)
    names = dict(experience.rewards) or {"reward_model": experience.scores}
    columns = {f"rewards/{name}": scores for name, scores in names.items()}
    columns["reward"] = experience.scores
    if targets is not None:
        columns["advantage"] = response_sums(targets.advantages, experience.mask) / lengths
    if experience.logprobs is not None:
        columns["kl"] = response_sums(experience.kl(), experience.mask)
    of_tokens = {
        "token_advantage": None if targets is None else targets.advantages,
        "token_kl": None if experience.logprobs is None else experience.kl(),
        "token_value": experience.values,
    }
    rows: list[dict[str, Any]] = []
    for known, by_token in _on_host(columns, of_tokens, count):
        response = experience.responses[len(rows)]
        episode, counts = response.episode, known["reward"] is not None
        row: dict[str, Any] = {
            "iteration": iteration,
            "prompt": decode(response.prompt),
            "response": decode(response.tokens, skip_special_tokens=True),
            "ended": response.ended,
            "rewards": {name: known[f"rewards/{name}"] for name in names},
            "reward": known["reward"],
            "advantage": known.get("advantage") if counts else None,
            "kl": known.get("kl") if counts else None,
            "length": response.num_actor_tokens,
        }
        if (version := response.origin.policy_version) is not None:
            row["policy_version"] = version
        if episode.earlier:
            row["messages"] = messages_after_prompt(response, decode)
        if sequences := episode.earlier_sequences:
            row["earlier_sequences"] = [
                {"prompt": decode(each.prompt), "response": decode(each.tokens)}
                for each in sequences
            ]
        if episode.failure:
            row["failure"] = episode.failure
        if logged := experience.logged_columns:
            row["extra"] = {name: entries[len(rows)] for name, entries in logged.items()}
        if counts and by_token is not None:
            kept = (compress(s.tokens, s.actor_mask or repeat(True)) for s in response.sequences)
            row["tokens"] = [decode([token]) for token in chain.from_iterable(kept)]
            row |= {name: values[: len(row["tokens"])] for name, values in by_token.items()}
        rows.append(row)
    return rows


def _on_host(
    columns: Mapping[str, Tensor], of_tokens: Mapping[str, Tensor | None], count: int
) -> Iterator[tuple[dict[str, float | None], dict[str, list[float]] | None]]:
    """The first ``count`` rows of (N,) columns and, of fewer rows, (N, R) columns; None for NaN.

    The device is waited for once.
    """
    by_token = {name: column for name, column in of_tokens.items() if column is not None}
    detailed = min(count, ROWS_BY_TOKEN)
    parts = [torch.stack([column[:count].double() for column in columns.values()], dim=1)]
    parts += [column[:detailed].double() for column in by_token.values()]
    flat = iter(torch.cat([part.flatten() for part in parts]).tolist())
    table, *tokens = ([[*islice(flat, p.shape[1])] for _ in range(p.shape[0])] for p in parts)
    for number, row in enumerate(table):
        known = {n: None if math.isnan(x) else x for n, x in zip(columns, row, strict=True)}
        if number >= detailed:
            yield known, None
            continue
        columns_of_tokens = zip(by_token, tokens, strict=True)
        yield known, {n: [float(f"{x:.4g}") for x in rows[number]] for n, rows in columns_of_tokens}
