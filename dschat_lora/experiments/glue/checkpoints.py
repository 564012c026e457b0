"""The Trainer's checkpoints, kept as those of other stages: verified by a manifest and rotated."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainerState

from dschat_lora.checkpoint.history import STATE_FILE, rotate
from dschat_lora.checkpoint.manifest import DamagedError, verify, write_manifest
from dschat_lora.checkpoint.staging import sync_all, write_whole
from dschat_lora.engine.collectives import max_over_ranks, on_rank_zero
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.report.directory import read_object
from dschat_lora.runtime.checkpointer import end_by_signal, how_to_go_on, state_to_keep
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.signals import name_of

# What DeepSpeed puts into its checkpoints besides tensors.
_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


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


def stop(run: OpenRun[GlueConfig], step: int) -> NoReturn:
    """End a run that a signal told to stop, whose state is saved; call on every rank.

    Raises:
        Stopped: with the exit code of the signal.
    """
    number = int(max_over_ranks(float(run.interrupts.received)))
    run.log.say(f"stopped by {name_of(number)} after step {step}; {how_to_go_on(run)}")
    end_by_signal(run, number, step)


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
            f"--load_best_model_at_end: the best evaluation so far is that of {beside.name}, which "
            f"cannot be used: {error}; put it beside {checkpoint}, or go on from an earlier "
            "checkpoint"
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
            found = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged, or no file of torch's: {error}") from None
        if strange := sorted(found - _OF_DEEPSPEED):
            raise ValueError(
                f"{path} would call {', '.join(strange)} when it is read, which no checkpoint of a "
                "run holds"
            )
