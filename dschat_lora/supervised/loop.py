"""Training and evaluation steps of the supervised stages: micro-batches in, losses out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from itertools import count as count_from
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.config.groups import OptimConfig, RunConfig
from dschat_lora.data.ahead import one_ahead, pinned_window
from dschat_lora.data.loader import Loader, Window
from dschat_lora.engine.build import StepOutcome, TrainEngine
from dschat_lora.engine.distributed import (
    data_rank,
    gather_over_ranks,
    sum_over_ranks,
    sum_with_requests,
)
from dschat_lora.engine.results import read_later, reads_late
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.perf.throughput import Flops, Meter, StepCounts
from dschat_lora.report.log import RunLog, train_line
from dschat_lora.runtime.checkpointer import Checkpointer
from dschat_lora.runtime.loop import Progress, TrainingLoop, broken_unless_finite, rate_metrics
from dschat_lora.supervised.objectives import CountedBatch, Means, Objective

ValueT = TypeVar("ValueT", float, Tensor)


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step."""

    loss: float  # mean of the whole step, in nats per supervised token or pair
    counts: StepCounts
    outcome: StepOutcome
    learning_rates: dict[str, float]  # learning rate of each parameter group
    requests: list[float] = field(default_factory=list)  # summed over ranks
    means: Means = field(default_factory=dict)  # over pairs, of the loss's columns


@dataclass
class TrainProgress(Progress):
    """How far a run has come, counted over all processes."""

    samples: int = 0
    tokens: int = 0  # without padding
    supervised_tokens: int = 0

    def add(self, result: TrainStep) -> None:
        """Count a step and its samples."""
        self.count_step(skipped=result.outcome.skipped)
        self.samples += result.counts.num_samples
        self.tokens += result.counts.num_tokens
        self.supervised_tokens += result.counts.num_targets


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
        num_chosen_targets=batch.num_chosen_targets,
    )


def queue_steps(
    engine: TrainEngine[nn.Module],
    windows: Iterable[Window | Sequence[Any]],
    objective: Objective,
    rate_factors: Iterable[float],
    *,
    requests: Callable[[], list[float]] = list,
) -> Iterator[Callable[[], TrainStep]]:
    """Train on each window of micro-batches, yielding what reads the results of its optimizer step.

    Each step minimizes the mean loss over all targets (or pairs) of the step, however unevenly
    they fall on micro-batches and ranks; this is the one place that divides. If that sum is not
    finite on any rank, no rank's gradient is, and the engine skips the step.

    Every rank must yield the same number of ``windows``, and of micro-batches in each. Where they
    are no ``Window``, the ranks add up what they hold. ``rate_factors`` multiply the peak learning
    rates, one for each step; ``requests`` are numbers of this rank to be summed over all along with
    the loss. What is yielded waits for the step's results, once it is called; with an fp16 loss
    scale the host waits here, as the next step needs to know of an overflow.
    """
    casts = FactorCasts(engine.module)
    for window, factor in zip(windows, rate_factors, strict=False):
        engine.train()
        learning_rates = engine.set_rates(factor)
        counts = count(window)
        totals = torch.zeros((), device=engine.device, dtype=torch.float64)
        with casts.in_use():
            loss_of = objective.loss_of(engine, window)
            for index, batch in enumerate(window):
                last = index == len(window) - 1
                result = loss_of(engine, batch.to(engine.device))
                # Those of the loss, of each column, and of each source's targets.
                parts = [*result.sums, *(column.sum() for column in result.columns.values())]
                own = torch.stack([part.detach().double() for part in parts])
                if result.by_source is not None:
                    own = torch.cat([own, result.by_source])
                totals = totals + own
                loss = _mean_loss(result.sums, counts, objective)
                if last:
                    shared = sum_with_requests(totals, requests())
                    loss = broken_unless_finite(loss, shared[: len(result.sums)].sum())
                engine.backward(loss, last=last)
        outcome = engine.queue_step()
        if engine.loss_scaler is not None:
            outcome()
        targets, metrics = dict[str, int](), dict[str, float]()
        if isinstance(window, Window):
            metrics = window.metrics
            targets = window.source_targets if result.by_source is not None else {}
        yield partial(
            _read_step,
            read_later(shared),
            counts,
            outcome,
            learning_rates,
            objective,
            num_sums=len(result.sums),
            columns=tuple(result.columns),
            source_targets=targets,
            metrics=metrics,
        )


def _read_step(
    shared: Callable[[], Tensor],
    counts: StepCounts,
    outcome: Callable[[], StepOutcome],
    learning_rates: dict[str, float],
    objective: Objective,
    *,
    num_sums: int,
    columns: Sequence[str],
    source_targets: dict[str, int],
    metrics: dict[str, float],
) -> TrainStep:
    """A step that the device has been given, for whose results the host waits.

    ``shared`` gives sums over all ranks, the first ``num_sums`` of the loss, and requests.
    ``metrics`` are the window's.
    """
    done = outcome()
    values = iter(shared().tolist())
    sums = list(islice(values, num_sums))
    mean = _mean_loss(sums, counts, objective)
    means: Means = {n: next(values) / max(1, counts.num_samples) for n in columns}
    means = {**objective.combine(means), **_nll_mean(sums, counts), **metrics}
    totals = {name: (next(values), n) for name, n in source_targets.items()}
    means |= {f"loss/{name}": total / n if n else None for name, (total, n) in totals.items()}
    return TrainStep(mean, counts, done, learning_rates, list(values), means)


def in_turn(
    reads: Iterable[Callable[[], TrainStep]], is_due: Callable[[int], bool]
) -> Iterator[tuple[TrainStep, bool]]:
    """The result of each step once the next one is queued, and whether none is queued behind it.

    ``is_due`` says of so many steps whose results are not read whether the last of them is to be
    read at once. So is the one after a step with requests, which can only be fulfilled there.
    Where none follows, or it fails, those that were made are read first.
    """
    queued = deque[Callable[[], TrainStep]]()
    try:
        for read in reads:
            queued.append(read)
            reads_all = is_due(len(queued))
            while len(queued) > 1 or (queued and reads_all):
                result = queued.popleft()()
                reads_all |= any(result.requests)
                yield result, not queued
    except Exception:
        for read in queued:
            yield read(), False
        raise
    for read in queued:
        yield read(), True


def _mean_loss(sums: Sequence[ValueT], counts: StepCounts, objective: Objective) -> ValueT:
    """The loss of a step or evaluation, from sums over some or all of it."""
    loss = sums[0] / max(1, getattr(counts, objective.mean_over))
    for nll in sums[1:]:
        loss = loss + nll / max(1, counts.num_chosen_targets)
    return loss


def _nll_mean(sums: Sequence[float], counts: StepCounts) -> Means:
    """The metric of chosen answers' cross-entropy, where that is a part of the loss."""
    if len(sums) == 1:
        return {}
    return {"nll_loss": sums[1] / max(1, counts.num_chosen_targets)}


@dataclass(frozen=True)
class Evaluation:
    """Results over the evaluation batches of all ranks."""

    loss: float  # nats per supervised token or pair
    counts: StepCounts
    columns: dict[str, Tensor]  # of all pairs, on CPU, rank after rank
    means: Means = field(default_factory=dict)  # further parts of the loss


@torch.no_grad()
def evaluate(
    engine: TrainEngine[nn.Module], batches: Iterable[Any], objective: Objective
) -> Evaluation:
    """Mean loss over every supervised token or pair of ``batches``; call on every rank.

    Every rank must bring the same number of batches. They are gone through twice where a loss
    depends on them all.
    """
    engine.eval()
    totals, own = torch.zeros((), device=engine.device, dtype=torch.float64), StepCounts()
    columns: dict[str, list[Tensor]] = {}
    loss_of = objective.loss_of(engine, batches)
    for batch in batches:
        result = loss_of(engine, batch.to(engine.device))
        totals = totals + torch.stack([part.double() for part in result.sums])
        own += _own_counts(batch)
        for name, column in result.columns.items():
            columns.setdefault(name, []).append(column)
    counts = _over_ranks(own)
    sums = sum_over_ranks(totals.reshape(-1).tolist())
    whole: dict[str, Tensor] = {}
    if columns:
        table = torch.stack([torch.cat(parts) for parts in columns.values()], dim=1)
        whole = dict(zip(columns, gather_over_ranks(table).cpu().unbind(1), strict=True))
    return Evaluation(_mean_loss(sums, counts, objective), counts, whole, _nll_mean(sums, counts))


@dataclass(frozen=True)
class TrainSchedule:
    """How long a run is, and how often it evaluates and logs."""

    num_steps: int  # optimizer steps of the whole run
    iterations_per_epoch: int  # an iteration of the training loop is a step here
    eval_interval: int  # steps between evaluations; 0: each epoch and the end only; -1: the end
    logging_steps: int

    @property
    def num_iterations(self) -> int:
        """The same: an iteration is a step."""
        return self.num_steps


def make_train_schedule(optim: OptimConfig, run: RunConfig, steps_per_epoch: int) -> TrainSchedule:
    """The schedule of a run over ``steps_per_epoch`` optimizer steps an epoch."""
    steps = optim.num_train_epochs * steps_per_epoch
    if steps and optim.max_steps:
        steps = optim.max_steps
    every = 1 if run.print_loss else run.logging_steps
    return TrainSchedule(steps, steps_per_epoch, run.eval_interval, every)


def fit(
    engine: TrainEngine[nn.Module],
    loader: Loader,
    objective: Objective,
    schedule: TrainSchedule,
    *,
    progress: TrainProgress,
    rate_factor: Callable[[int], float],
    seed: int,
    meter: Meter,
    log: RunLog,
    evaluate_at: Callable[[int], None],
    checkpointer: Checkpointer,
    extra_flops: Callable[[StepCounts], Flops] | None = None,
    ends_early: Callable[[], bool] = lambda: False,
) -> None:
    """Train by the schedule from where ``progress`` is; call on every rank.

    ``rate_factor`` multiplies the peak rates, by steps done. ``extra_flops`` are those of a step
    besides forward and backward, such as those of a reference. ``ends_early`` says after an
    evaluation whether the run ends there.
    """
    loop = TrainingLoop(
        schedule,
        progress,
        evaluate=evaluate_at,
        evaluated_up_to=lambda: progress.step - 1,
        checkpointer=checkpointer,
        log=log,
        restart_clock=meter.start,
        ends_early=ends_early,
        has_ended=lambda: loader.has_ended,
    )
    loop.begin()
    if ends_early():  # before it was resumed
        return
    late = reads_late(engine.device)
    reads = queue_steps(
        engine,
        seeded_windows(loader, schedule, start=progress.step, seed=seed, ahead=late),
        objective,
        map(rate_factor, count_from(progress.step)),
        requests=checkpointer.requests,
    )
    for result, newest in in_turn(reads, loop.is_due if late else lambda _: True):
        progress.add(result)
        extra = extra_flops(result.counts) if extra_flops is not None else None
        throughput = meter.step(result.counts, extra=extra)
        step, outcome = progress.step, result.outcome
        metrics = step_metrics(result, epoch=step / schedule.iterations_per_epoch) | throughput
        log.write("train", step, metrics)
        if outcome.skipped:
            log.write("event", step, {"event": "skipped_step", **asdict(outcome)})
        if step % schedule.logging_steps == 0 or step == schedule.num_steps:
            shown, left = metrics | meter.window(), log.time_left(step)
            line = train_line(step, schedule.num_steps, shown, left=left, verbose=log.is_verbose)
            log.say_metrics(line)
        requests, scales_loss = result.requests if newest else None, outcome.loss_scale > 1
        if loop.after_iteration(requests, skipped=outcome.skipped, scales_loss=scales_loss):
            return


def seeded_windows(
    loader: Loader, schedule: TrainSchedule, *, start: int = 0, seed: int, ahead: bool = False
) -> Iterator[Window]:
    """The micro-batches of each step of the schedule from ``start`` on, in turn.

    Dropout draws from (seed, step, share of the data) alone: a resumed run draws what it would
    have drawn, and ranks that hold one model between them draw alike. ``ahead`` has a thread make
    the next window, in pinned memory; not of a stream, which reads ahead in a thread of its own,
    and whose state is that of the window that was taken last.
    """
    left = max(0, schedule.num_steps - start)
    windows: Iterator[Window] = islice(loader.steps(start), left)
    if ahead and not loader.reads_ahead:
        windows = one_ahead(map(pinned_window, windows))
    for step, window in enumerate(windows, start):
        torch.manual_seed(stream_seed("dropout", seed, step, data_rank()))
        yield window


def step_metrics(result: TrainStep, *, epoch: float) -> dict[str, Any]:
    """The fields of a train line that do not depend on time."""
    return {
        "epoch": epoch,
        "loss": result.loss,
        **rate_metrics(result.learning_rates),
        "grad_norm": result.outcome.grad_norm,
        "loss_scale": result.outcome.loss_scale,
        "skipped": result.outcome.skipped,
        "samples": result.counts.num_samples,
        "tokens": result.counts.num_tokens,
        "supervised_tokens": result.counts.num_targets,
        **result.means,
    }
