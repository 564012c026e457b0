"""What the Trainer says, into metrics.jsonl and onto the terminal."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from transformers import TrainerCallback, TrainerControl, TrainerState

from dschat_lora.engine import peers
from dschat_lora.engine.collectives import max_over_ranks
from dschat_lora.engine.distributed import world_size
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.report.log import RunLog
from dschat_lora.runtime.signals import Interrupts

_MISMATCHED = "eval_mm_"
_STEPS_BETWEEN_QUESTIONS = 10


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Writes a line of ``metrics.jsonl`` for each thing the Trainer logs.

    Attributes:
        metrics: of the newest evaluation, by the Trainer's names, as of :attr:`step`.
        evaluations: those of every step so far, by the step.
        first_step: after which training began.
    """

    def __init__(
        self,
        log: RunLog,
        config: GlueConfig,
        *,
        begin: Callable[[TrainerState], None],
        rows: Callable[[], int],
        saved: Callable[[TrainerState], None],
        stop: Callable[[int], NoReturn],
        interrupts: Interrupts,
    ) -> None:
        """Call ``begin`` when training begins, ``rows`` for the rows trained on so far.

        ``saved`` is called on every rank when the Trainer has written a checkpoint. It writes one
        too when ``interrupts`` has received a signal, and ``stop`` is called after that.
        """
        self._log, self._task, self._lora = log, config.task, config.apply_lora
        self._begin, self._rows, self._saved = begin, rows, saved
        self._stop, self._interrupts = stop, interrupts
        self._is_stopping = self._is_owed = False
        self._last, self._last_step, self._last_rows = time.monotonic(), 0, 0
        self.first_step = 0
        self.step = -1
        self.metrics: dict[str, float] = {}
        self.evaluations: dict[int, dict[str, float]] = {}

    def on_train_begin(
        self, settings: object, state: TrainerState, control: object, **more: Any
    ) -> None:
        """Count seconds of a step from here."""
        self._begin(state)
        self.first_step = self._last_step = state.global_step
        self._last = time.monotonic()
        self._log.expect(state.max_steps, state.global_step)

    def remember(self, evaluations: dict[int, dict[str, float]]) -> None:
        """Take over what a run that is gone on with has measured."""
        self.evaluations = evaluations
        if evaluations:
            self.step = max(evaluations)
            self.metrics = evaluations[self.step]

    def on_step_end(
        self, settings: object, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Move the progress bar, and have the state saved where the run is told to stop.

        After the last step of an epoch it is saved in :meth:`on_epoch_end`, behind an evaluation.
        """
        peers.after_a_step()
        self._log.advance()
        if (state.epoch or 0.0).is_integer():
            self._is_owed, control.should_save = control.should_save, False
            return
        # To ask the other processes is to wait for them and the device.
        asks = world_size() == 1 or state.global_step % _STEPS_BETWEEN_QUESTIONS == 0
        if asks:
            self._ask(control)

    def on_epoch_end(
        self, settings: object, state: object, control: TrainerControl, **more: Any
    ) -> None:
        """Have the state saved where the last step asked for it, or the run is told to stop."""
        control.should_save = control.should_save or self._is_owed
        self._is_owed = False
        self._ask(control)

    def _ask(self, control: TrainerControl) -> None:
        if max_over_ranks(float(self._interrupts.received)) > 0:
            control.should_save = self._is_stopping = True

    def on_save(self, settings: object, state: TrainerState, control: object, **more: Any) -> None:
        """Make a checkpoint of what the Trainer wrote."""
        self._saved(state)
        if self._is_stopping:
            self._stop(state.global_step)

    def on_log(
        self,
        settings: object,
        state: TrainerState,
        control: object,
        logs: dict[str, Any],
        **more: Any,
    ) -> None:
        """One line for a training step or an evaluation; the Trainer's summary is passed over."""
        step = state.global_step
        if any(name.startswith("eval_") for name in logs):
            self._evaluated(step, logs)
        elif "loss" in logs:
            self._trained(step, state.max_steps, logs)

    def _trained(self, step: int, total: int, logs: dict[str, Any]) -> None:
        now, steps, rows = time.monotonic(), max(step - self._last_step, 1), self._rows()
        seconds, samples = now - self._last, rows - self._last_rows
        fields = {
            **{name: logs.get(name) for name in ("epoch", "loss", "learning_rate", "grad_norm")},
            "lora_learning_rate": logs.get("learning_rate") if self._lora else None,
            "samples": samples / steps,
            "step_seconds": seconds / steps,
            "samples_per_second": samples / seconds,
        }
        self._last, self._last_step, self._last_rows = now, step, rows
        self._log.write("train", step, fields)
        self._log.say(
            f"step {step:>{len(str(total))}}/{total}  loss {fields['loss']:.4f}  "
            f"lr {fields['learning_rate']:.2e}  grad {fields['grad_norm'] or 0:.3g}  "
            f"{fields['step_seconds']:.2f} s"
        )
        if not math.isfinite(logs["loss"]):
            raise ValueError(
                f"training stopped at step {step}: the loss is {logs['loss']}; lower "
                "--learning_rate"
            )

    def _evaluated(self, step: int, logs: dict[str, Any]) -> None:
        mismatched = any(name.startswith(_MISMATCHED) for name in logs)
        prefix = _MISMATCHED if mismatched else "eval_"
        found = {n.removeprefix(prefix): v for n, v in logs.items() if n.startswith(prefix)}
        names = ["loss", *self._task.measures]
        names += ["combined_score"] if "combined_score" in found else []
        self.metrics = (self.metrics if step == self.step else {}) | {
            prefix + name: found[name] for name in names
        }
        self.step = step
        self.evaluations[step] = self.metrics
        label = "mm_" if mismatched else ""
        fields = {"epoch": logs.get("epoch"), **{label + name: found[name] for name in names}}
        self._log.write("eval", step, fields)
        shown = "  ".join(f"{name} {found[name]:.4f}" for name in [*names[1:], "loss"])
        self._log.say(f"eval after step {step}{' (mismatched)' if mismatched else ''}: {shown}")
        self._last = time.monotonic()


def evaluations_in(path: Path) -> dict[int, dict[str, float]]:
    """Measures of each evaluation in a log, by the step and the Trainer's names."""
    other = {"kind", "step", "time", "epoch"}
    found: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "eval":
            measures = {f"eval_{n}": float(v) for n, v in record.items() if n not in other}
            found.setdefault(record["step"], {}).update(measures)
    return found
