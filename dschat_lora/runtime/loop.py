"""The training loop of every stage: evaluate, iterate, check, save, until the run is complete.

An iteration is one optimizer step of the supervised stages, and of step 3 all steps on the
responses that were generated for it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.engine import peers
from dschat_lora.report.log import RunLog
from dschat_lora.runtime.checkpointer import Checkpointer
from dschat_lora.runtime.signals import StopRequested

# Steps in a row whose gradient is not finite, before a run is given up.
MAX_SKIPS = 3
MAX_SKIPS_FP16 = 40  # a loss scale of 2^32 needs as many halvings to reach 1


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
        """Optimizer steps between evaluations; 0: at the start, each epoch and the end."""


@dataclass(frozen=True)
class IterationOutcome:
    """What the loop needs to know of an iteration."""

    requests: list[float]  # those of the :class:`Checkpointer`, summed over ranks
    skipped: bool  # whether its last step changed no weight
    scales_loss: bool  # whether an fp16 loss scale may still have to fall


def run_loop(
    iterations: Iterable[IterationOutcome],
    schedule: Schedule,
    progress: Progress,
    *,
    evaluate: Callable[[int], None],
    evaluated_up_to: Callable[[], int],
    checkpointer: Checkpointer,
    log: RunLog,
    restart_clock: Callable[[], None] = lambda: None,
) -> None:
    """Evaluate, iterate from where ``progress`` is, and evaluate and save when due and last.

    ``iterations`` makes one each time it is asked, and counts it in ``progress``. ``evaluate`` is
    called with the optimizer steps made; an interval that ends after ``evaluated_up_to()`` steps is
    due. ``restart_clock`` is called where time was spent on something else than training. Call on
    every rank.

    Raises:
        ValueError: when steps keep being skipped, or all were, because the gradient is not finite.
    """
    total = schedule.num_iterations
    if progress.iteration and progress.iteration == total:
        log.say("the run was complete: there is no step left to train")
    if not progress.iteration or _eval_due(schedule, progress, evaluated_up_to()):
        _evaluate_or_stop(evaluate, checkpointer, progress.step)
    log.expect(total, progress.iteration)
    restart_clock()
    for outcome in iterations:
        peers.after_a_step()
        last = progress.iteration == total
        _check_skips(progress, checkpointer, scales_loss=outcome.scales_loss, last=last)
        due = _eval_due(schedule, progress, evaluated_up_to())
        if evaluates := due and not checkpointer.is_stopping(outcome.requests, last=last):
            _evaluate_or_stop(evaluate, checkpointer, progress.step)
        saved = checkpointer.after_step(
            progress.step, outcome.requests, skipped=outcome.skipped, last=last
        )
        if saved or evaluates:
            restart_clock()


def _eval_due(schedule: Schedule, progress: Progress, evaluated: int) -> bool:
    interval = schedule.eval_interval
    # An iteration may take several steps, or none: the interval may end within one.
    due = interval > 0 and progress.step // interval > evaluated // interval
    whole_epoch = progress.iteration % schedule.iterations_per_epoch == 0
    return due or whole_epoch or progress.iteration == schedule.num_iterations


def _evaluate_or_stop(
    evaluate: Callable[[int], None], checkpointer: Checkpointer, step: int
) -> None:
    try:
        evaluate(step)
    except StopRequested:
        checkpointer.stop(step)


def _check_skips(
    progress: Progress, checkpointer: Checkpointer, *, scales_loss: bool, last: bool
) -> None:
    """Stop a run whose gradient stays non-finite; falling loss scales need some patience.

    A run that never had another gradient is not passed off as finished.
    """
    skipped, patience = progress.skipped_in_a_row, MAX_SKIPS_FP16 if scales_loss else MAX_SKIPS
    if skipped >= patience or (last and 0 < skipped == progress.step):
        broken = checkpointer.broken_weight()
        where = "" if broken is None else f"{broken} holds values that are not finite. "
        times = "once" if skipped == 1 else f"{skipped} times in a row"
        raise ValueError(
            f"training stopped at step {progress.step}: the gradient was not finite {times}; "
            f"such steps change no weight. {where}Lower the learning rate or try --dtype bf16. "
            f"{checkpointer.last_good()}"
        )


def broken_unless_finite(loss: Tensor, total: Tensor) -> Tensor:
    """``loss`` or, where ``total`` is not finite, NaN, as its gradient will be.

    A loss of infinity can have a finite gradient (that of ``-log 0`` has). No value is waited
    for, so a GPU keeps working.
    """
    finite = torch.isfinite(total)
    return loss * torch.where(finite, 1.0, math.nan).to(loss.dtype)
