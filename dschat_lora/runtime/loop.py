"""The training loop of every stage: evaluations, checks and checkpoints around its iterations.

An iteration is one optimizer step of the supervised stages, and of step 3 all steps on the
responses that were generated for it.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dschat_lora.engine import failure_detection
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
    ) -> None:
        """Prepare the loop of a run.

        ``evaluate`` is called with the optimizer steps made; an interval that ends after
        ``evaluated_up_to()`` steps is due. ``restart_clock`` is called where time was spent on
        something else than training.
        """
        self._schedule, self._progress, self._log = schedule, progress, log
        self._evaluate, self._evaluated_up_to = evaluate, evaluated_up_to
        self._checkpointer, self._restart_clock = checkpointer, restart_clock

    def begin(self) -> None:
        """Evaluate where that is due before the first iteration."""
        progress, total = self._progress, self._schedule.num_iterations
        if progress.iteration and progress.iteration == total:
            self._log.say("the run was complete: there is no step left to train")
        if not progress.iteration or self._eval_is_due():
            self._evaluate_or_stop()
        self._log.expect(total, progress.iteration)
        self._restart_clock()

    def after_iteration(self, requests: list[float], *, skipped: bool, scales_loss: bool) -> None:
        """Evaluate and save where that is due after an iteration, or at the end.

        Args:
            requests: those of the checkpointer, summed over ranks.
            skipped: whether the iteration's last step changed no weight.
            scales_loss: whether an fp16 loss scale may still have to fall.

        Raises:
            ValueError: when steps keep being skipped, or all were, as the gradient is not finite.
        """
        failure_detection.after_a_step()
        progress, checkpointer = self._progress, self._checkpointer
        last = progress.iteration == self._schedule.num_iterations
        if progress.skipped_in_a_row:
            self._check_skips(scales_loss=scales_loss, last=last)
        evaluates = self._eval_is_due() and not checkpointer.is_stopping(requests, last=last)
        if evaluates:
            self._evaluate_or_stop()
        saved = checkpointer.after_step(progress.step, requests, skipped=skipped, last=last)
        if saved or evaluates:
            self._restart_clock()

    def _eval_is_due(self) -> bool:
        iteration, interval = self._progress.iteration, self._schedule.eval_interval
        # An iteration may take several steps, or none: the interval may end within one.
        ended = interval > 0 and (
            self._progress.step // interval > self._evaluated_up_to() // interval
        )
        whole_epoch = iteration % self._schedule.iterations_per_epoch == 0
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
                f"such steps change no weight. {where}Lower the learning rate or try --dtype bf16. "
                f"{self._checkpointer.last_good()}"
            )


def broken_unless_finite(loss: Tensor, total: Tensor) -> Tensor:
    """``loss`` or, where ``total`` is not finite, NaN, as its gradient will be.

    A loss of infinity can have a finite gradient (that of ``-log 0`` has). No value is waited
    for, so a GPU keeps working.
    """
    finite = torch.isfinite(total)
    return loss * torch.where(finite, 1.0, math.nan).to(loss.dtype)
