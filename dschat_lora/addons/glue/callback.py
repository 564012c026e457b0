"""What the Trainer says and saves: metrics.jsonl, the terminal, and checkpoints as of other stages.

A checkpoint is what the Trainer wrote, with the state of the run and a manifest; older ones are
deleted.
"""

import json
import math
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.checkpoint.history import STATE_FILE, read_state, rotate
from dschat_lora.checkpoint.manifest import DamagedError, verify, write_manifest
from dschat_lora.config.staging import sync_all, write_whole
from dschat_lora.engine import failure_detection
from dschat_lora.engine.distributed import (
    broadcast_string,
    max_over_ranks,
    on_rank_zero,
    world_size,
)
from dschat_lora.report.directory import read_object
from dschat_lora.report.texts import clock
from dschat_lora.runtime.checkpointer import end_by_signal, how_to_go_on, state_to_keep, take_over
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.signals import name_of

_MISMATCHED = "eval_mm_"
_STEPS_BETWEEN_QUESTIONS = 10
# What DeepSpeed puts into its checkpoints besides tensors.
_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers is untyped
    """Writes a line of ``metrics.jsonl`` for what the Trainer logs, and completes checkpoints.

    Attributes:
        metrics: of the newest evaluation, by the Trainer's names, as of :attr:`step`.
        evaluations: those of every step so far, by the step.
        first_step: after which training began.
    """

    def __init__(
        self, run: OpenRun[GlueConfig], identity: Mapping[str, Any], *, rows: Callable[[], int]
    ) -> None:
        """``identity`` says what the run's state belongs to, ``rows`` counts those trained on."""
        self._run, self._log, self._identity, self._rows = run, run.log, identity, rows
        self._is_stopping = self._is_owed = False
        self._last, self._last_step, self._last_rows = time.monotonic(), 0, 0
        self.first_step = 0
        self.step = -1
        self.metrics: dict[str, float] = {}
        self.evaluations: dict[int, dict[str, float]] = {}

    def on_train_begin(
        self, settings: object, state: TrainerState, control: object, **more: object
    ) -> None:
        """Take over what a resumed run has measured, and count seconds of a step from here."""
        if self._run.config.checkpoint:
            self._resume(Path(self._run.config.checkpoint), state)
        self.first_step = self._last_step = state.global_step
        self._last = time.monotonic()
        self._log.expect(state.max_steps, state.global_step)

    def _resume(self, checkpoint: Path, state: TrainerState) -> None:
        """Take over log, measures and the best of a resumed run; call on every rank."""
        if self._run.config.load_best_model_at_end:
            state.best_model_checkpoint = best_before(checkpoint)

        def read() -> dict[int, dict[str, float]]:
            take_over(self._run, read_state(checkpoint))
            assert self._run.directory is not None, "a dry run trains nothing"
            return evaluations_in(self._run.directory / "metrics.jsonl")

        evaluations = json.loads(broadcast_string(json.dumps(on_rank_zero(read))))
        self.evaluations = {int(step): measures for step, measures in evaluations.items()}
        if self.evaluations:
            self.step = max(self.evaluations)
            self.metrics = self.evaluations[self.step]

    def on_step_end(
        self, settings: object, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        """Have the state saved where the run is told to stop.

        After the last step of an epoch it is saved in :meth:`on_epoch_end`, behind an evaluation.
        """
        failure_detection.after_a_step()
        if (state.epoch or 0.0).is_integer():
            self._is_owed, control.should_save = control.should_save, False
            return
        # To ask the other processes is to wait for them and the device.
        asks = world_size() == 1 or state.global_step % _STEPS_BETWEEN_QUESTIONS == 0
        if asks:
            self._ask(control)

    def on_epoch_end(
        self, settings: object, state: object, control: TrainerControl, **more: object
    ) -> None:
        """Have the state saved where the last step asked for it, or the run is told to stop."""
        control.should_save = control.should_save or self._is_owed
        self._is_owed = False
        self._ask(control)

    def _ask(self, control: TrainerControl) -> None:
        if max_over_ranks(float(self._run.interrupts.received)) > 0:
            control.should_save = self._is_stopping = True

    def on_save(
        self, settings: object, state: TrainerState, control: object, **more: object
    ) -> None:
        """Complete what the Trainer wrote, and end a run that was told to stop; on every rank.

        Raises:
            Stopped: with the exit code of the signal.
        """
        complete(self._run, self._identity, state)
        if self._is_stopping:
            number = int(max_over_ranks(float(self._run.interrupts.received)))
            step, how = state.global_step, how_to_go_on(self._run)
            self._log.say(f"stopped by {name_of(number)} after step {step}; {how}")
            end_by_signal(self._run, number, step)

    def on_log(
        self,
        settings: object,
        state: TrainerState,
        control: object,
        logs: dict[str, Any],
        **more: object,
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
        rate = logs.get("learning_rate")
        fields = {
            **{name: logs.get(name) for name in ("epoch", "loss", "learning_rate", "grad_norm")},
            "lora_learning_rate": rate if self._run.config.apply_lora else None,
            "samples": samples / steps,
            "step_seconds": seconds / steps,
            "samples_per_second": samples / seconds,
        }
        self._last, self._last_step, self._last_rows = now, step, rows
        self._log.write("train", step, fields)
        self._log.say(
            f"step {step:>{len(str(total))}}/{total}  loss {fields['loss']:.4f}  "
            f"lr {fields['learning_rate']:.2e}  {fields['samples_per_second']:,.0f} samples/s  "
            f"{clock(self._log.time_left(step))} left"
        )
        if not math.isfinite(logs["loss"]):
            raise ValueError(
                f"training stopped at step {step}: the loss is {logs['loss']}; lower "
                "--learning_rate"
            )

    def _evaluated(self, step: int, logs: dict[str, Any]) -> None:
        mismatched = any(name.startswith(_MISMATCHED) for name in logs)
        prefix = _MISMATCHED if mismatched else "eval_"
        measures = {n.removeprefix(prefix): v for n, v in logs.items() if n.startswith(prefix)}
        names = ["loss", *self._run.config.task.measures]
        names += ["combined_score"] if "combined_score" in measures else []
        self.metrics = (self.metrics if step == self.step else {}) | {
            prefix + name: measures[name] for name in names
        }
        self.step = step
        self.evaluations[step] = self.metrics
        label = "mm_" if mismatched else ""
        fields = {"epoch": logs.get("epoch"), **{label + name: measures[name] for name in names}}
        self._log.write("eval", step, fields)
        shown = "  ".join(f"{name} {measures[name]:.4f}" for name in [*names[1:], "loss"])
        self._log.say(f"eval after step {step}{' (mismatched)' if mismatched else ''}: {shown}")
        self._last = time.monotonic()


def evaluations_in(path: Path) -> dict[int, dict[str, float]]:
    """Measures of each evaluation in a log, by the step and the Trainer's names."""
    other = {"kind", "step", "time", "epoch"}
    evaluations: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "eval":
            measures = {f"eval_{n}": float(v) for n, v in record.items() if n not in other}
            evaluations.setdefault(record["step"], {}).update(measures)
    return evaluations


def complete(run: OpenRun[GlueConfig], identity: Mapping[str, Any], state: TrainerState) -> None:
    """Add the run's state and a manifest to what the Trainer wrote; call on every rank.

    Without them, as a killed process leaves it, a checkpoint is not gone on from. Those that
    ``--save_total_limit`` does not keep are deleted after that.
    """
    max_over_ranks(0.0)  # each process has written its random state

    def write() -> None:
        assert run.directory is not None, "a dry run trains nothing"
        run.log.sync()
        step = state.global_step
        path = run.directory / f"checkpoint-{step}"
        facts = state_to_keep(run.config, step, run.log, identity)
        write_whole(path / STATE_FILE, json.dumps(facts, indent=1) + "\n")
        write_manifest(path, kind="checkpoint")
        sync_all(path)  # before an older one is deleted
        limit, best = run.config.save_total_limit, state.best_global_step
        rotate(run.directory, keep=limit or 0, newest=step, best=best)

    on_rank_zero(write)


def best_before(checkpoint: Path) -> str | None:
    """Where the best evaluation before ``checkpoint`` is kept; None if there was none.

    It is looked for beside ``checkpoint``, then where the Trainer has noted, for a run may have
    been moved, or gone on in another directory.

    Raises:
        ValueError: if it is in neither place, or damaged.
    """
    state = read_object(checkpoint / "trainer_state.json")
    if not (step := state.get("best_global_step")):
        return None
    beside = checkpoint.with_name(f"checkpoint-{step}")
    noted = state.get("best_model_checkpoint")
    path = beside if beside.is_dir() or noted is None else Path(noted).absolute()
    try:
        verify(path, kind="checkpoint")
    except DamagedError as error:
        raise ValueError(
            f"--load_best_model_at_end: the best evaluation so far is that of {beside.name}, "
            f"which cannot be used: {error}; put it next to {checkpoint}, or resume from an "
            "earlier checkpoint"
        ) from error
    return str(path)


def check_pickles(checkpoint: Path) -> None:
    """Refuse a checkpoint of DeepSpeed's that runs code when it is read; it is not read here.

    The Trainer's own files are read without the right to run any.

    Raises:
        ValueError: naming the file and what it calls.
    """
    for path in sorted(checkpoint.glob("global_step*/*.pt")):
        try:
            called = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged, or not a torch file: {error}") from None
        if strange := sorted(called - _OF_DEEPSPEED):
            raise ValueError(
                f"{path} would call {', '.join(strange)} when loaded, which no checkpoint of a "
                "run contains"
            )
