"""The one training loop of the supervised stages: micro-batches in, optimizer steps out."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from itertools import count as count_from
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.config import OptimConfig, RunConfig
from dschat_lora.data.loader import StepLoader
from dschat_lora.engine.build import StepOutcome, TrainEngine
from dschat_lora.engine.distributed import sum_over_ranks
from dschat_lora.perf.throughput import Meter, StepCounts
from dschat_lora.report.log import RunLog, train_line

MAX_SKIPS = 3
MAX_SKIPS_FP16 = 40  # a loss scale of 2^32 needs as many halvings to reach 1


class Batch(Protocol):
    """What the loop needs of a micro-batch: its counts, and a way to the device."""

    num_targets: int
    num_tokens: int
    num_samples: int
    num_attended: int
    input_ids: Tensor

    def to(self, device: torch.device) -> Any:
        """The same batch on ``device``."""


LossFunction = Callable[[TrainEngine, Any], Tensor]


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step."""

    loss: float  # nats per supervised token of the whole step
    counts: StepCounts
    outcome: StepOutcome
    rates: dict[str, float]  # learning rate of each parameter group


def count(batches: Iterable[Batch]) -> StepCounts:
    """Counts of the batches of all ranks; call on every rank."""
    return _over_ranks(sum((_own_counts(batch) for batch in batches), StepCounts()))


def _over_ranks(counts: StepCounts) -> StepCounts:
    return StepCounts(*(round(value) for value in sum_over_ranks(list(astuple(counts)))))


def _own_counts(batch: Batch) -> StepCounts:
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
    engine: TrainEngine,
    windows: Iterable[list[Any]],
    loss_function: LossFunction,
    rate_factors: Iterable[float],
) -> Iterator[TrainStep]:
    """Train on each window of micro-batches, yielding after its optimizer step.

    Each step descends the mean loss over all targets of the step, however unevenly they fall
    on micro-batches and ranks; this is the one place that divides.

    Args:
        engine: over the model.
        windows: this rank's micro-batches of each optimizer step; every rank must yield the
            same number of windows, and of micro-batches in each.
        loss_function: summed loss of one micro-batch, in nats.
        rate_factors: multiplier of the peak learning rates, one for each step.
    """
    for window, factor in zip(windows, rate_factors, strict=False):
        engine.train()
        rates = engine.set_rates(factor)
        counts = count(window)
        total = torch.zeros((), device=engine.device, dtype=torch.float64)
        for index, batch in enumerate(window):
            loss = loss_function(engine, batch.to(engine.device))
            total += loss.detach()
            engine.backward(loss / max(1, counts.num_targets), last=index == len(window) - 1)
        outcome = engine.step()
        (summed,) = sum_over_ranks([float(total)])
        yield TrainStep(summed / max(1, counts.num_targets), counts, outcome, rates)


@dataclass(frozen=True)
class Evaluation:
    """Token-weighted results over the evaluation batches of all ranks."""

    loss: float  # nats per supervised token
    counts: StepCounts

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; inf where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    engine: TrainEngine, batches: Iterable[Any], loss_function: LossFunction
) -> Evaluation:
    """Mean loss over every supervised token of ``batches``; call on every rank.

    Every rank must bring the same number of batches.
    """
    engine.eval()
    total, own = torch.zeros((), device=engine.device, dtype=torch.float64), StepCounts()
    for batch in batches:
        total += loss_function(engine, batch.to(engine.device))
        own += _own_counts(batch)
    counts = _over_ranks(own)
    (summed,) = sum_over_ranks([float(total)])
    return Evaluation(summed / max(1, counts.num_targets), counts)


@dataclass(frozen=True)
class Plan:
    """How long a run is, and when it looks up."""

    num_epochs: int
    num_steps: int  # optimizer steps of the whole run
    eval_interval: int  # steps between evaluations; 0: each epoch and the end only
    logging_steps: int


def make_plan(optim: OptimConfig, run: RunConfig, steps_per_epoch: int) -> Plan:
    """The plan of a run over ``steps_per_epoch`` optimizer steps an epoch."""
    epochs, steps = optim.num_train_epochs, optim.num_train_epochs * steps_per_epoch
    if optim.max_steps and epochs and steps_per_epoch:
        steps = optim.max_steps
        epochs = math.ceil(steps / steps_per_epoch)
    every = 1 if run.print_loss else run.logging_steps
    return Plan(epochs, steps, run.eval_interval, every)


def fit(
    engine: TrainEngine,
    loader: StepLoader,
    loss_function: LossFunction,
    plan: Plan,
    *,
    rate_factor: Callable[[int], float],
    meter: Meter,
    log: RunLog,
    evaluate_at: Callable[[int], None],
) -> None:
    """Evaluate, train by the plan, and evaluate on the way and at the end.

    Args:
        engine: over the model.
        loader: this rank's micro-batches.
        loss_function: summed loss of one micro-batch.
        plan: from :func:`make_plan`.
        rate_factor: multiplier of the peak rates, by steps done.
        meter: of throughput.
        log: receives a train line each step.
        evaluate_at: called with the steps done, on every rank.

    Raises:
        ValueError: when steps keep being skipped because the gradient is not finite.
    """
    evaluate_at(0)
    log.expect(plan.num_steps)
    step = skipped = 0
    meter.start()
    for epoch in range(plan.num_epochs):
        windows = islice(loader.epoch(epoch), plan.num_steps - step)
        for result in train_steps(
            engine, windows, loss_function, map(rate_factor, count_from(step))
        ):
            step += 1
            rates = meter.step(result.counts)
            metrics = step_metrics(result, epoch=step / loader.steps_per_epoch) | rates
            log.write("train", step, metrics)
            log.advance()
            if result.outcome.skipped:
                log.write("event", step, {"event": "skipped_step", **asdict(result.outcome)})
            skipped = skipped + 1 if result.outcome.skipped else 0
            _check_skips(skipped, step, result.outcome)
            if step % plan.logging_steps == 0 or step == plan.num_steps:
                log.say(train_line(step, plan.num_steps, metrics | meter.window()))
            if _evaluates_after(step, plan, loader.steps_per_epoch):
                evaluate_at(step)
                meter.start()


def step_metrics(result: TrainStep, *, epoch: float) -> dict[str, Any]:
    """The fields of a train line that do not depend on time.

    ``learning_rate`` is that of the base weights or, where none trains, the adapters'.
    """
    lora = [rate for name, rate in result.rates.items() if name.startswith("lora")]
    base = [rate for name, rate in result.rates.items() if not name.startswith("lora")]
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
    }


def _evaluates_after(step: int, plan: Plan, steps_per_epoch: int) -> bool:
    due = plan.eval_interval and step % plan.eval_interval == 0
    return bool(due) or step % steps_per_epoch == 0 or step == plan.num_steps


def _check_skips(skipped: int, step: int, outcome: StepOutcome) -> None:
    """Stop a run whose gradient stays non-finite; falling loss scales need some patience."""
    limit = MAX_SKIPS_FP16 if outcome.loss_scale > 1 else MAX_SKIPS
    if skipped >= limit:
        raise ValueError(
            f"training stopped at step {step}: the gradient was not finite {skipped} times in a "
            "row, and no weight was changed by it; lower the learning rate or try --dtype bf16"
        )
