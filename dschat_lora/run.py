"""A run from its first rank joining to how it ended: directory, log and record."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from dschat_lora.checkpoint.history import CHECKPOINTS, checkpoints_of, clear_unfinished, set_aside
from dschat_lora.cli.options import build_config, fail, flatten, in_words, typed_options
from dschat_lora.config import SupervisedConfig
from dschat_lora.engine.distributed import agree, init_distributed, rank, shutdown, world_size
from dschat_lora.interrupt import Interrupts, Stopped, name_of
from dschat_lora.randomness import stream_seed
from dschat_lora.report.directory import abandon_directory, check_idle, claim_directory
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord, environment
from dschat_lora.resume import goes_on_in_place

Check = Callable[[SupervisedConfig], SupervisedConfig]


@dataclass(frozen=True)
class Output:
    """Where a run writes, its log and its record. Every rank holds one; rank 0's is active."""

    config: SupervisedConfig  # as settled for every rank
    directory: Path
    log: RunLog
    record: RunRecord
    interrupts: Interrupts


@contextmanager
def open_run(config: SupervisedConfig, *, name: str, check: Check) -> Iterator[Output]:
    """Join the process group, open the output directory, and record how the run ends.

    A ValueError, a user's mistake that shows only now, an error of the disk and a full GPU end
    the process as one line.

    Args:
        config: the stage's checked config.
        name: of the stage, such as ``sft``; also of the default directory.
        check: what checked it, for ranks that wait for rank 0 to settle a resumed run.
    """
    opened: list[Output] = []
    with Interrupts() as interrupts:
        try:
            init_distributed()
            config = _settled(config, check)
            torch.manual_seed(stream_seed("build", config.run.seed))
            with _files(config, name, interrupts) as output:
                opened.append(output)
                yield output
            output.record.update({"status": "finished"})
        except BaseException as error:
            _record_end(error, opened, interrupts)
            if isinstance(error, Stopped):
                shutdown()
            elif interrupts.received:
                # Whatever the error: ranks that are told to stop leave each other in the middle.
                fail(_last_words(error, interrupts), code=128 + interrupts.received)
            _fail_if_expected(error, opened)
            raise
    # Not after a failure: leaving the group can wait for ranks that are gone.
    shutdown()


def _settled(config: SupervisedConfig, check: Check) -> SupervisedConfig:
    """Rank 0's config on every rank, where a checkpoint decided it."""
    if not config.run.resume_from_checkpoint:
        return config
    mine = {"options": typed_options(config), "checkpoint": config.checkpoint}
    settled = json.loads(agree(json.dumps(mine)))
    if rank() == 0:
        return config
    config = build_config(type(config), settled["options"])
    return check(replace(config, checkpoint=settled["checkpoint"]))


@contextmanager
def _files(config: SupervisedConfig, name: str, interrupts: Interrupts) -> Iterator[Output]:
    active = rank() == 0
    if config.run.dry_run:
        with RunLog(None, active=active) as log:
            yield Output(config, Path(), log, RunRecord(Path(), active=False), interrupts)
        return
    directory = Path(agree(str(_directory(config, name)) if active else ""))
    earlier = goes_on_in_place(config)
    board = _board(config, directory)
    with RunLog(directory, active=active, tensorboard=board, earlier=earlier) as log:
        record = RunRecord(directory, active=active, earlier=earlier)
        record.update({"stage": name, "status": "running", **environment()})
        record.update({"world_size": world_size(), "config": flatten(config)})
        log.say(f"output: {directory}")
        yield Output(config, directory, log, record, interrupts)
        log.sync()


def _directory(config: SupervisedConfig, name: str) -> Path:
    given = config.run.output_dir
    if given is not None:
        check_idle(Path(given).expanduser())
        clear_unfinished(Path(given).expanduser())
    if given is not None and goes_on_in_place(config):
        return Path(given).expanduser()
    if config.run.resume_from_checkpoint != "auto":
        return claim_directory(given, name=name)
    # A fresh start where no checkpoint was sound: those that are not stay for a closer look.
    directory = claim_directory(given, name=name, spared=frozenset({CHECKPOINTS}))
    set_aside(directory, after=-1, rejected=checkpoints_of(directory))
    return directory


def _last_words(error: BaseException, interrupts: Interrupts) -> str:
    """Why a run that was told to stop ended, and whether it could be saved."""
    words = f"stopped by {name_of(interrupts.received)}"
    if isinstance(error, ValueError | OSError):
        words += f"; what was learnt since the last checkpoint is not saved: {in_words(error)}"
    return words


def _record_end(error: BaseException, opened: list[Output], interrupts: Interrupts) -> None:
    """Write why the run ended, where there is a record and room for it."""
    if isinstance(error, Stopped) or not opened or not opened[0].record.is_open:
        return
    status = f"failed: {type(error).__name__}: {error}"
    if interrupts.received:
        status = f"failed: {_last_words(error, interrupts)}"
        if isinstance(error, SystemExit):
            status = f"interrupted by {name_of(interrupts.received)}"
    with contextlib.suppress(OSError):
        opened[0].record.update({"status": status})


def _fail_if_expected(error: BaseException, opened: list[Output]) -> None:
    """End the process with one line, unless ``error`` is a fault of this package."""
    if os.environ.get("DSCHAT_LORA_TRACEBACK"):
        return
    if isinstance(error, ValueError):
        if opened and rank() == 0:
            abandon_directory(opened[0].directory)
        fail(str(error))
    if isinstance(error, torch.OutOfMemoryError):
        who = f"rank {rank()}: " if world_size() > 1 else ""
        fail(f"{who}{error}", code=1, from_any_rank=True)
    if isinstance(error, OSError | SafetensorError):
        fail(in_words(error), code=1)


def _board(config: SupervisedConfig, directory: Path) -> Path | None:
    """Where TensorBoard files go, if they are wanted."""
    if config.run.report_to != "tensorboard":
        return None
    return Path(config.run.tensorboard_path or directory / "tensorboard")
