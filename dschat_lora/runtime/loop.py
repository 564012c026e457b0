"""The training loop of every stage: evaluations, checks and checkpoints around its iterations.

An iteration is one optimizer step of the supervised stages, and of step 3 all steps on the
responses that were generated for it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import stdev
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.algos.schedules import constant, linear
from dschat_lora.config.data import SourceConfig
from dschat_lora.config.groups import ScheduleConfig
from dschat_lora.config.options import command_line
from dschat_lora.config.stages import StageConfig
from dschat_lora.engine import failure_detection
from dschat_lora.engine.distributed import world_size
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.log import RunLog, jsonable
from dschat_lora.report.terminal import sample_lines
from dschat_lora.runtime.checkpointer import Checkpointer
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.signals import StopRequested

# Steps in a row whose gradient is not finite, before a run is given up.
MAX_SKIPS = 3
MAX_SKIPS_FP16 = 40  # a loss scale of 2^32 needs as many halvings to reach 1
# Optimizer steps of an epoch, and of a run in which three rows or fifty were learnt by heart.
FEW_STEPS, ENOUGH_STEPS = 20, 60
LARGE_DATA = 1_000  # rows


@dataclass
class Progress:
    """Optimizer steps made so far, saved and restored with the run."""

    step: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0

    @property
    def iteration(self) -> int:
        """Iterations made so far."""
        return self.step

    def count_step(self, *, skipped: bool) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def state(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])


class Schedule(Protocol):
    """How long a run is, and how often it evaluates."""

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run."""

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations of a pass over the data."""

    @property
    def eval_interval(self) -> int:
        """Optimizer steps between evaluations; 0: at the ends of epochs; -1: at that of the run."""


def check_repeats(data: SourceConfig, times: Mapping[str, float], schedule: Schedule) -> None:
    """Refuse to use rows more often than ``--max_repeats``, where their number is known.

    ``times`` are those that rows of each source are used per epoch.

    Raises:
        ValueError: naming the source.
    """
    if data.tail is not None:
        return
    bounds = dict(zip(times, data.max_repeats * max(1, len(times)), strict=False))
    epochs = math.ceil(schedule.num_iterations / max(1, schedule.iterations_per_epoch))
    for name, bound in bounds.items():
        # The same rows are upsampled in every epoch.
        used = epochs * math.ceil(round(times[name], 9))
        if bound and used > bound:
            raise ValueError(
                f"--max_repeats {bound}: the run would use rows of {name} {used} times; give it a "
                "smaller fraction, fewer epochs or steps, or a larger --max_repeats"
            )


def small_data_warning(
    rows: int,
    kind: str,
    steps_of: Callable[[int, int], int],
    *,
    epochs: int,
    size: str,
    batch: int,
    least: int,
    accumulation: int,
) -> str | None:
    """Options by which small data is learnt, where it makes few optimizer steps; None elsewhere.

    They are few where an epoch has less than 20, and all epochs less than 60.

    Args:
        rows: of an epoch.
        kind: what they are called.
        steps_of: gives the steps of an epoch by the rows of a micro-batch and the accumulation.
        epochs: ``--num_train_epochs``.
        size: option of the rows of a micro-batch.
        batch: its value.
        least: the smallest value that is advised.
        accumulation: ``--gradient_accumulation_steps``; steps that this makes large are taken to
            be meant where data is not small.
    """
    now = steps_of(batch, accumulation)
    if not 0 < now < FEW_STEPS or not 0 < epochs * now < ENOUGH_STEPS:
        return None
    if accumulation > 1 and rows >= LARGE_DATA:
        return None
    smaller = [batch]
    while smaller[-1] // 2 >= least and steps_of(smaller[-1], 1) < FEW_STEPS:
        smaller.append(smaller[-1] // 2)
    steps = steps_of(smaller[-1], 1)
    # The largest that makes as many.
    fewer = next(each for each in smaller if steps_of(each, 1) == steps)
    more = max(epochs, -(-ENOUGH_STEPS // steps))
    changes = {"num_train_epochs": more} if more > epochs else {}
    changes |= {size: fewer} if fewer < batch else {}
    changes |= {"gradient_accumulation_steps": 1} if steps_of(fewer, accumulation) < steps else {}
    return (
        f"{rows:,} {kind} make {now} optimizer step{'s' * (now > 1)} an epoch, and the run "
        f"{epochs * now}, too few to learn much; {' '.join(command_line(changes))} makes "
        f"{more * steps}"
    )


class TrainingLoop:
    """What a stage does around its iterations: evaluate, check, save. Call on every rank.

    The stage calls :meth:`begin`, then makes one iteration after another from where ``progress``
    is, counts it there, and calls :meth:`after_iteration`.
    """

    def __init__(
        self,
        schedule: Schedule,
        progress: Progress,
        *,
        evaluate: Callable[[int], None],
        evaluated_up_to: Callable[[], int],
        checkpointer: Checkpointer,
        log: RunLog,
        restart_clock: Callable[[], None] = lambda: None,
        ends_early: Callable[[], bool] = lambda: False,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the loop of a run.

        ``evaluate`` is called with the optimizer steps made; an interval that ends after
        ``evaluated_up_to()`` steps is due. ``restart_clock`` is called where time was spent on
        something else than training. ``ends_early`` says whether evaluations ask for an end,
        ``has_ended`` whether the data has no further iteration.
        """
        self._schedule, self._progress, self._log = schedule, progress, log
        self._evaluate, self._evaluated_up_to = evaluate, evaluated_up_to
        self._checkpointer, self._restart_clock = checkpointer, restart_clock
        self._ends_early, self._has_ended = ends_early, has_ended

    def begin(self) -> None:
        """Evaluate where that is due before the first iteration."""
        progress, total = self._progress, self._schedule.num_iterations
        if progress.iteration and progress.iteration == total:
            self._log.say("the run was complete: no steps are left")
        if not progress.iteration or self._eval_is_due():
            self._evaluate_or_stop()
        self._log.expect(total, progress.iteration)
        self._restart_clock()

    def is_due(self, ahead: int) -> bool:
        """Whether an evaluation, a checkpoint or the end is due once ``ahead`` more steps are made.

        Each is an iteration that is queued, but not yet counted in the progress.
        """
        step = self._progress.step + ahead
        return self._eval_is_due(ahead) or self._has_ended() or self._checkpointer.is_due(step)

    def after_iteration(
        self, requests: list[float] | None, *, skipped: bool, scales_loss: bool
    ) -> bool:
        """Evaluate and save where that is due after an iteration, or at the end; whether it is.

        Args:
            requests: those of the checkpointer, summed over ranks; None where the next step
                is queued, which changes weights: nothing but the gradient is looked at then.
            skipped: whether the iteration's last step changed no weight.
            scales_loss: whether an fp16 loss scale may still have to fall.

        Raises:
            ValueError: when steps keep being skipped, or all were, as the gradient is not finite.
        """
        failure_detection.after_a_step()
        progress, checkpointer = self._progress, self._checkpointer
        last = progress.iteration == self._schedule.num_iterations or self._has_ended()
        last = last and requests is not None
        if progress.skipped_in_a_row:
            self._check_skips(scales_loss=scales_loss, last=last)
        if requests is None:
            return False
        is_due = last or self._eval_is_due()
        evaluates = is_due and not checkpointer.is_stopping(requests, last=last)
        if evaluates:
            self._evaluate_or_stop()
            last = last or self._ends_early()
        saved = checkpointer.after_step(progress.step, requests, skipped=skipped, last=last)
        if saved or evaluates:
            self._restart_clock()
        return last

    def _eval_is_due(self, ahead: int = 0) -> bool:
        iteration, interval = self._progress.iteration + ahead, self._schedule.eval_interval
        # An iteration may take several steps, or none: the interval may end within one.
        ended = interval > 0 and (
            (self._progress.step + ahead) // interval
            > (self._evaluated_up_to() + ahead) // interval
        )
        whole_epoch = interval >= 0 and iteration % self._schedule.iterations_per_epoch == 0
        return ended or whole_epoch or iteration == self._schedule.num_iterations

    def _evaluate_or_stop(self) -> None:
        try:
            self._evaluate(self._progress.step)
        except StopRequested:
            self._checkpointer.stop(self._progress.step)

    def _check_skips(self, *, scales_loss: bool, last: bool) -> None:
        """Stop a run whose gradient stays non-finite; falling loss scales need some patience.

        A run that never had another gradient is not passed off as finished.
        """
        progress, patience = self._progress, MAX_SKIPS_FP16 if scales_loss else MAX_SKIPS
        skipped = progress.skipped_in_a_row
        if skipped >= patience or (last and skipped == progress.step):
            broken = self._checkpointer.broken_weight()
            where = "" if broken is None else f"{broken} holds values that are not finite. "
            times = "once" if skipped == 1 else f"{skipped} times in a row"
            raise ValueError(
                f"training stopped at step {progress.step}: the gradient was not finite {times}; "
                f"such steps are skipped. {where}Lower the learning rate or try --dtype bf16. "
                f"{self._checkpointer.last_good()}"
            )


def broken_unless_finite(loss: Tensor, total: Tensor) -> Tensor:
    """``loss`` or, where ``total`` is not finite, NaN, as its gradient will be.

    A loss of infinity can have a finite gradient (that of ``-log 0`` has). No value is waited
    for, so a GPU keeps working.
    """
    finite = torch.isfinite(total)
    return loss * torch.where(finite, 1.0, math.nan).to(loss.dtype)


# Multiplier of the peak rate at each optimizer step, counted from 0.
RateFactor = Callable[[int], float]
# What a polynomial ends at, as a share of the peak.
POLYNOMIAL_END = 1e-7


def rate_factor(name: str, *, num_warmup_steps: int, num_steps: int) -> RateFactor:
    """The factor of a scheduler of transformers, such as ``cosine``; steps count from 0."""
    warmup, total = num_warmup_steps, max(1, num_steps)

    def factor(step: int) -> float:
        if name == "constant":
            return 1.0
        if name == "constant_with_warmup":
            return constant(step, warmup=warmup)
        if name == "linear" or step < warmup:
            return linear(step, warmup=warmup, total=total)
        progress = (step - warmup) / max(1, total - warmup)
        if name == "polynomial":
            remaining = max(0.0, 1 - progress)
            return (1 - POLYNOMIAL_END) * remaining + POLYNOMIAL_END
        assert name in ("cosine", "cosine_with_restarts"), name
        # One period of half a wave: there is nothing that restarts.
        return (1 + math.cos(math.pi * min(progress, 1.0))) / 2

    return factor


def rate_metrics(rates: Mapping[str, float]) -> dict[str, float | None]:
    """The rate of base weights or, where none trains, of the adapters; and the adapters' own."""
    lora = [rate for name, rate in rates.items() if name.startswith("lora")]
    base = [rate for name, rate in rates.items() if not name.startswith("lora")]
    return {"learning_rate": (base or lora)[0], "lora_learning_rate": lora[0] if lora else None}


def standard_schedule(optim: ScheduleConfig) -> Callable[[int], RateFactor]:
    """From the steps of the whole run, what ``--lr_scheduler_type`` makes of the rate."""
    return lambda num_steps: rate_factor(
        optim.lr_scheduler_type, num_warmup_steps=optim.num_warmup_steps, num_steps=num_steps
    )


@dataclass
class EvalResults:
    """Metrics of each evaluation by optimizer step, saved and restored with the run."""

    run: OpenRun[StageConfig]
    line: Callable[[int, Mapping[str, Any]], str]  # an evaluation for a person
    by_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    _first: dict[str, list[float]] = field(default_factory=dict)  # of each sample, at the first one

    def __contains__(self, step: int) -> bool:
        return step in self.by_step

    @property
    def last_step(self) -> int:
        """Optimizer steps made before the latest evaluation."""
        return max(self.by_step, default=0)

    def add(
        self, step: int, metrics: dict[str, Any], values: Mapping[str, Tensor] | None = None
    ) -> None:
        """Keep, log and show the metrics after ``step`` optimizer steps.

        ``values`` are (N,) those of each sample whose mean is the metric of that name, in the order
        of the first evaluation. Of their change since then the standard error is kept too.
        """
        own = {name: column.tolist() for name, column in (values or {}).items()}
        self._first = self._first if self.by_step else own
        for name in own.keys() & self._first.keys() if self.by_step else ():
            error = paired_standard_error(self._first[name], own[name])
            metrics |= {} if math.isnan(error) else {f"{name}_change_standard_error": error}
        self.by_step[step] = metrics
        self.run.log.write("eval", step, metrics)
        self.run.log.say_metrics(self.line(step, metrics))

    def before_and_after(self, *names: str) -> dict[str, float]:
        """These metrics of the first and the last evaluation, for record and card."""
        if not self.by_step:
            return {}
        first, *_, last = [*self.by_step.values()] * 2
        known = [name for name in names if name in first]
        before = {f"{name} before": float(first[name]) for name in known}
        return before | {f"{name} after": float(last[name]) for name in known}

    def state(self) -> dict[str, Any]:
        first = {"processes": world_size(), "values": jsonable(self._first)}
        return {
            **{str(step): jsonable(metrics) for step, metrics in self.by_step.items()},
            "first": first,
        }

    def restore(self, state: dict[str, Any]) -> None:
        steps, first = dict(state), state.get("first", {})
        steps.pop("first", None)
        self.by_step = {int(step): metrics for step, metrics in steps.items()}
        # Another number of processes may have the samples in another order.
        known = first["values"] if first.get("processes") == world_size() else {}
        self._first = {name: list(map(float, values)) for name, values in known.items()}


def paired_standard_error(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard error of the mean change of the same samples, as of the paired t-test.

    NaN where fewer than two are known, or others before than after.
    """
    pairs = list(zip(before, after, strict=True))
    if any(math.isnan(a) != math.isnan(b) for a, b in pairs):
        return math.nan
    changes = [b - a for a, b in pairs if not math.isnan(a)]
    return stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan


@dataclass
class AnswerLog:
    """Sample answers and losses of tokens before and after training, kept with the run."""

    run: OpenRun[StageConfig]
    tokenizer: Tokenizer
    shown: list[dict[str, str]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)

    def has(self, when: str) -> bool:
        """Whether there are answers from ``when``."""
        return any(text["when"] == when for text in self.shown)

    def show(self, when: str, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Print and record (prompt, answer) token ids, in the place of those from ``when``."""
        decode, texts = self.tokenizer.decode, []
        for prompt, answer in answers:
            texts.append({"when": when, "prompt": decode(prompt), "answer": decode(answer)})
            plain = decode(answer, skip_special_tokens=True)
            self.run.log.say(sample_lines(when, decode(prompt), plain))
        self.shown = [*(text for text in self.shown if text["when"] != when), *texts]
        self.run.record.update({"answers": self.shown, "token_losses": self.losses})

    def state(self) -> dict[str, Any]:
        return {"shown": self.shown, "losses": self.losses}

    def restore(self, state: dict[str, Any]) -> None:
        self.shown = list(state["shown"])
        self.losses = list(state.get("losses", ()))  # absent before 0.2
