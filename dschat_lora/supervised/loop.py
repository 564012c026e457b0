"""The one training loop of the supervised stages: micro-batches in, optimizer steps out."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import count as count_from
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.config.groups import OptimConfig, RunConfig
from dschat_lora.data.loader import StepLoader, Window
from dschat_lora.engine.build import StepOutcome, TrainEngine
from dschat_lora.engine.distributed import (
    data_rank,
    gather_over_ranks,
    sum_over_ranks,
    sum_with_requests,
)
from dschat_lora.perf.flops import Flops
from dschat_lora.perf.throughput import Meter, StepCounts
from dschat_lora.report.log import RunLog, train_line
from dschat_lora.runtime.setup import MAX_SKIPS, MAX_SKIPS_FP16, broken_unless_finite
from dschat_lora.runtime.signals import StopRequested
from dschat_lora.supervised.objectives import BatchLoss, Objective


class CountedBatch(Protocol):
    """What the loop needs of a micro-batch: its counts, and a way to the device."""

    num_targets: int
    num_tokens: int
    num_samples: int
    num_attended: int
    input_ids: Tensor

    def to(self, device: torch.device) -> Any:
        """The same batch on ``device``."""


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step."""

    loss: float  # mean of the whole step, in nats per supervised token or pair
    counts: StepCounts
    outcome: StepOutcome
    learning_rates: dict[str, float]  # learning rate of each parameter group
    requests: list[float] = field(default_factory=list)  # summed over ranks
    means: dict[str, float] = field(default_factory=dict)  # over pairs, of the loss's columns


class StepHooks(Protocol):
    """Keeps the run's state safe; see :class:`dschat_lora.runtime.checkpointer.StepHooks`."""

    def requests(self) -> list[float]:
        """What this rank wants to happen after the step, as numbers to be summed over ranks."""

    def is_stopping(self, requests: list[float]) -> bool:
        """Whether the sums tell the run to end after this step."""

    def after_step(self, step: int, requests: list[float], *, skipped: bool, last: bool) -> bool:
        """Save if due, or end the run; whether anything was saved."""

    def stop(self, step: int) -> None:
        """Save and end the run."""

    def last_good(self) -> str:
        """Where to go on from after a failure, for its message."""


@dataclass
class Progress:
    """How far a run has come: counted over all processes, saved and restored with it."""

    step: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0
    samples: int = 0
    tokens: int = 0  # without padding
    supervised_tokens: int = 0

    def add(self, result: TrainStep) -> None:
        """Count a step."""
        self.step += 1
        self.skipped += result.outcome.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.outcome.skipped else 0
        self.samples += result.counts.num_samples
        self.tokens += result.counts.num_tokens
        self.supervised_tokens += result.counts.num_targets

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        for name in asdict(self):
            setattr(self, name, state[name])


def count(batches: Window | Sequence[CountedBatch]) -> StepCounts:
    """Counts of the batches of all ranks, which must be asked unless the loader knows them.

    Call on every rank.
    """
    if isinstance(batches, Window):
        return StepCounts(**batches.counts)
    return _over_ranks(sum((_own_counts(batch) for batch in batches), StepCounts()))


def _over_ranks(counts: StepCounts) -> StepCounts:
    return StepCounts(*(round(value) for value in sum_over_ranks(list(astuple(counts)))))


def _own_counts(batch: CountedBatch) -> StepCounts:
    rows, length = batch.input_ids.shape
    return StepCounts(
        num_samples=batch.num_samples,
        num_tokens=batch.num_tokens,
        num_targets=batch.num_targets,
        num_attended=batch.num_attended,
        num_positions=rows * length,
        num_scored_pairs=rows * length**2,
    )


def train_steps(
    engine: TrainEngine[nn.Module],
    windows: Iterable[Window | Sequence[Any]],
    objective: Objective,
    rate_factors: Iterable[float],
    *,
    requests: Callable[[], list[float]] = list,
) -> Iterator[TrainStep]:
    """Train on each window of micro-batches, yielding after its optimizer step.

    Each step descends the mean loss over all targets (or pairs) of the step, however unevenly
    they fall on micro-batches and ranks; this is the one place that divides. If that sum is not
    finite on any rank, no rank's gradient is, and the engine skips the step.

    Args:
        engine: over the model.
        windows: this rank's micro-batches of each optimizer step; every rank must yield the
            same number of windows, and of micro-batches in each. Where they are no ``Window``,
            the ranks add up what they hold.
        objective: what to descend.
        rate_factors: multiplier of the peak learning rates, one for each step.
        requests: numbers of this rank to be summed over all along with the loss.
    """
    for window, factor in zip(windows, rate_factors, strict=False):
        engine.train()
        learning_rates = engine.set_rates(factor)
        counts = count(window)
        divisor = max(1, getattr(counts, objective.mean_over))
        totals = torch.zeros((), device=engine.device, dtype=torch.float64)
        for index, batch in enumerate(window):
            last = index == len(window) - 1
            result = objective.loss(engine, batch.to(engine.device))
            totals = totals + _sums(result)
            loss = result.total
            if last:
                shared = sum_with_requests(totals, requests())
                loss = broken_unless_finite(loss, shared[0])
            engine.backward(loss / divisor, last=last)
        outcome = engine.step()
        values = iter(shared.tolist())
        mean = next(values) / divisor
        means = {name: next(values) / max(1, counts.num_samples) for name in result.columns}
        yield TrainStep(mean, counts, outcome, learning_rates, list(values), means)


def _sums(result: BatchLoss) -> Tensor:
    """(1 + columns,) float64: the loss and the sum of each column."""
    parts = [result.total.detach(), *(column.sum() for column in result.columns.values())]
    return torch.stack([part.double() for part in parts])


@dataclass(frozen=True)
class Evaluation:
    """Results over the evaluation batches of all ranks."""

    loss: float  # nats per supervised token or pair
    counts: StepCounts
    columns: dict[str, Tensor]  # of all pairs, on CPU, rank after rank


@torch.no_grad()
def evaluate(
    engine: TrainEngine[nn.Module], batches: Iterable[Any], objective: Objective
) -> Evaluation:
    """Mean loss over every supervised token or pair of ``batches``; call on every rank.

    Every rank must bring the same number of batches.
    """
    engine.eval()
    total, own = torch.zeros((), device=engine.device, dtype=torch.float64), StepCounts()
    columns: dict[str, list[Tensor]] = {}
    for batch in batches:
        result = objective.loss(engine, batch.to(engine.device))
        total += result.total
        own += _own_counts(batch)
        for name, column in result.columns.items():
            columns.setdefault(name, []).append(column)
    counts = _over_ranks(own)
    (summed,) = sum_over_ranks([float(total)])
    whole: dict[str, Tensor] = {}
    if columns:
        table = torch.stack([torch.cat(parts) for parts in columns.values()], dim=1)
        whole = dict(zip(columns, gather_over_ranks(table).cpu().unbind(1), strict=True))
    return Evaluation(summed / max(1, getattr(counts, objective.mean_over)), counts, whole)


@dataclass(frozen=True)
class TrainSchedule:
    """How long a run is, and when it looks up."""

    num_epochs: int
    num_steps: int  # optimizer steps of the whole run
    eval_interval: int  # steps between evaluations; 0: each epoch and the end only
    logging_steps: int


def make_train_schedule(optim: OptimConfig, run: RunConfig, steps_per_epoch: int) -> TrainSchedule:
    """The plan of a run over ``steps_per_epoch`` optimizer steps an epoch."""
    epochs, steps = optim.num_train_epochs, optim.num_train_epochs * steps_per_epoch
    if optim.max_steps and epochs and steps_per_epoch:
        steps = optim.max_steps
        epochs = math.ceil(steps / steps_per_epoch)
    every = 1 if run.print_loss else run.logging_steps
    return TrainSchedule(epochs, steps, run.eval_interval, every)


def fit(
    engine: TrainEngine[nn.Module],
    loader: StepLoader,
    objective: Objective,
    plan: TrainSchedule,
    *,
    progress: Progress,
    rate_factor: Callable[[int], float],
    seed: int,
    meter: Meter,
    log: RunLog,
    evaluate_at: Callable[[int], None],
    checkpointer: StepHooks,
    extra_flops: Callable[[StepCounts], Flops] | None = None,
) -> None:
    """Evaluate, train by the plan from where ``progress`` is, and evaluate on the way and last.

    Args:
        engine: over the model.
        loader: this rank's micro-batches.
        objective: what to descend.
        plan: from :func:`make_train_schedule`.
        progress: kept up to date.
        rate_factor: multiplier of the peak rates, by steps done.
        seed: of the run, for dropout.
        meter: of throughput.
        log: receives a train line each step.
        evaluate_at: called with the steps done, on every rank.
        checkpointer: asked to save after each step.
        extra_flops: of a step besides forward and backward, such as those of a reference.

    Raises:
        ValueError: when steps keep being skipped because the gradient is not finite.
    """
    done, per_epoch = progress.step, loader.steps_per_epoch
    if done and done == plan.num_steps:
        log.say("the run was complete: there is no step left to train")
    if not done or _evaluates_after(done, plan, per_epoch):
        _evaluate(evaluate_at, checkpointer, done)
    log.expect(plan.num_steps, done)
    meter.start()
    for result in train_steps(
        engine,
        seeded_windows(loader, plan, start=done, seed=seed),
        objective,
        map(rate_factor, count_from(done)),
        requests=checkpointer.requests,
    ):
        progress.add(result)
        step = progress.step
        extra = extra_flops(result.counts) if extra_flops is not None else None
        learning_rates = meter.step(result.counts, extra=extra)
        metrics = step_metrics(result, epoch=step / per_epoch) | learning_rates
        _report(result, metrics, progress, plan, meter=meter, log=log)
        _check_skips(progress, result.outcome, checkpointer)
        looks = _evaluates_after(step, plan, per_epoch) and not checkpointer.is_stopping(
            result.requests
        )
        if looks:
            _evaluate(evaluate_at, checkpointer, step)
        saved = checkpointer.after_step(
            step, result.requests, skipped=result.outcome.skipped, last=step == plan.num_steps
        )
        if saved or looks:
            meter.start()


def seeded_windows(
    loader: StepLoader, plan: TrainSchedule, *, start: int, seed: int
) -> Iterator[Window]:
    """The micro-batches of each step of the plan from ``start`` on, in turn.

    Dropout draws from (seed, step, share of the data) alone: a resumed run draws what it would
    have drawn, and ranks that hold one model between them draw alike.
    """
    step = start
    while step < plan.num_steps:
        epoch, first = divmod(step, loader.steps_per_epoch)
        for window in islice(loader.epoch(epoch, first), plan.num_steps - step):
            torch.manual_seed(stream_seed("dropout", seed, step, data_rank()))
            step += 1
            yield window


def _evaluate(evaluate_at: Callable[[int], None], checkpointer: StepHooks, step: int) -> None:
    try:
        evaluate_at(step)
    except StopRequested:
        checkpointer.stop(step)


def _report(
    result: TrainStep,
    metrics: dict[str, Any],
    progress: Progress,
    plan: TrainSchedule,
    *,
    meter: Meter,
    log: RunLog,
) -> None:
    step = progress.step
    log.write("train", step, metrics)
    log.advance()
    if result.outcome.skipped:
        log.write("event", step, {"event": "skipped_step", **asdict(result.outcome)})
    if step % plan.logging_steps == 0 or step == plan.num_steps:
        log.say(train_line(step, plan.num_steps, metrics | meter.window()))


def step_metrics(result: TrainStep, *, epoch: float) -> dict[str, Any]:
    """The fields of a train line that do not depend on time.

    ``learning_rate`` is that of the base weights or, where none trains, the adapters'.
    """
    lora = [rate for name, rate in result.learning_rates.items() if name.startswith("lora")]
    base = [rate for name, rate in result.learning_rates.items() if not name.startswith("lora")]
    return {
        "epoch": epoch,
        "loss": result.loss,
        "learning_rate": (base or lora)[0],
        "lora_learning_rate": lora[0] if lora else None,
        "grad_norm": result.outcome.grad_norm,
        "loss_scale": result.outcome.loss_scale,
        "skipped": result.outcome.skipped,
        "samples": result.counts.num_samples,
        "tokens": result.counts.num_tokens,
        "supervised_tokens": result.counts.num_targets,
        **result.means,
    }


def _evaluates_after(step: int, plan: TrainSchedule, steps_per_epoch: int) -> bool:
    due = plan.eval_interval and step % plan.eval_interval == 0
    return bool(due) or step % steps_per_epoch == 0 or step == plan.num_steps


def _check_skips(progress: Progress, outcome: StepOutcome, checkpointer: StepHooks) -> None:
    """Stop a run whose gradient stays non-finite; falling loss scales need some patience."""
    skipped = progress.skipped_in_a_row
    limit = MAX_SKIPS_FP16 if outcome.loss_scale > 1 else MAX_SKIPS
    if skipped >= limit:
        raise ValueError(
            f"training stopped at step {progress.step}: the gradient was not finite {skipped} "
            "times in a row; those steps changed no weight. Lower the learning rate or try "
            f"--dtype bf16. {checkpointer.last_good()}"
        )
