"""A run from its first rank joining to how it ended: directory, log and record."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.checkpoint.history import (
    CHECKPOINTS,
    checkpoints_of,
    clear_unfinished,
    quarantine,
    quarantine_checkpoints,
)
from dschat_lora.config.options import build_config, fail, flatten, typed_options
from dschat_lora.config.stages import StageConfig
from dschat_lora.engine.distributed import (
    broadcast_string,
    form_grid,
    init_distributed,
    on_rank_zero,
    rank,
    shutdown,
    world_size,
)
from dschat_lora.report.directory import abandon_directory, check_idle, claim_directory
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord, environment
from dschat_lora.report.terminal import error_message
from dschat_lora.runtime.resume import goes_on_in_place
from dschat_lora.runtime.signals import Interrupts, Stopped, name_of

# What tells how a run went, besides its run.json.
_STORY = ("metrics.jsonl", "tensorboard")
Check = Callable[[Any], StageConfig]


@dataclass(frozen=True)
class Run:
    """Where a run writes, its log and its record. Every rank holds one; rank 0's is active."""

    stage: str  # its name
    config: StageConfig  # as settled for every rank
    directory: Path | None  # None for a dry run
    log: RunLog
    record: RunRecord
    interrupts: Interrupts
    closing: ExitStack  # what has to happen, or to be said, before the log is closed


@contextmanager
def open_run(config: StageConfig, *, name: str, check: Check) -> Iterator[Run]:
    """Join the process group, open the output directory, and record how the run ends.

    A ValueError, a user's mistake that shows only now, an error of the disk and a full GPU end
    the process as one line.

    Args:
        config: the stage's checked config.
        name: of the stage, such as ``sft``; also of the default directory.
        check: what checked it, for ranks that wait for rank 0 to settle a resumed run.
    """
    opened: list[Run] = []
    interrupts = Interrupts()
    try:
        init_distributed()
        config = _resolved(config, check)
        form_grid(config.parallel.tensor_parallel_size)
        torch.manual_seed(stream_seed("build", config.run.seed))
        with _files(config, name, interrupts) as run:
            opened.append(run)
            with run.closing:
                yield run
        run.record.update({"status": "finished"})
        on_rank_zero(run.record.check)
    except BaseException as error:
        _record_end(error, opened, interrupts)
        if isinstance(error, Stopped):
            shutdown()
        _fail_if_expected(error, opened, interrupts)
        raise
    # Not after a failure: leaving the group can wait for ranks that are gone.
    shutdown()


def _resolved(config: StageConfig, check: Check) -> StageConfig:
    """Rank 0's config on every rank, where a checkpoint decided it."""
    if not config.run.resume_from_checkpoint:
        return config
    mine = {"options": typed_options(config), "checkpoint": config.checkpoint}
    resolved = json.loads(broadcast_string(json.dumps(mine)))
    if rank() == 0:
        return config
    config = build_config(type(config), resolved["options"])
    return check(replace(config, checkpoint=resolved["checkpoint"]))


@contextmanager
def _files(config: StageConfig, name: str, interrupts: Interrupts) -> Iterator[Run]:
    active = rank() == 0
    if config.run.dry_run:
        with RunLog(None, active=active) as log:
            record = RunRecord(Path(), active=False)
            yield Run(name, config, None, log, record, interrupts, ExitStack())
        return
    directory = Path(broadcast_string(str(on_rank_zero(lambda: _directory(config, name)))))
    earlier = goes_on_in_place(config)
    opened = on_rank_zero(
        lambda: RunLog(
            directory, active=True, tensorboard=_board(config, directory), earlier=earlier
        )
    )
    with opened or RunLog(None, active=False) as log:
        record = RunRecord(directory, active=active, earlier=earlier)
        record.update({"stage": name, "status": "running", **environment()})
        record.update({"world_size": world_size(), "config": flatten(config)})
        log.say(f"output: {directory}")
        yield Run(name, config, directory, log, record, interrupts, ExitStack())
        on_rank_zero(log.sync)


def _directory(config: StageConfig, name: str) -> Path:
    given = config.run.output_dir
    if given is not None:
        check_idle(Path(given).expanduser())
        clear_unfinished(Path(given).expanduser())
    if given is not None and goes_on_in_place(config):
        return Path(given).expanduser()
    if config.run.resume_from_checkpoint != "auto":
        return claim_directory(given, name=name)
    # A fresh start where no checkpoint was sound: what there was stays for a closer look.
    unsound = checkpoints_of(Path(given).expanduser()) if given is not None else []
    spared = {CHECKPOINTS, *(_STORY if unsound else ())}
    directory = claim_directory(given, name=name, spared=frozenset(spared))
    quarantine_checkpoints(directory, after=-1, rejected=unsound)
    for path in (directory / each for each in _STORY if unsound):
        if path.exists():
            quarantine(path, "rejected")
    return directory


def _record_end(error: BaseException, opened: list[Run], interrupts: Interrupts) -> None:
    """Write why the run ended, where there is a record."""
    if isinstance(error, Stopped) or not opened or not opened[0].record.is_open:
        return
    status = f"failed: {type(error).__name__}: {error}"
    if interrupts.received and isinstance(error, SystemExit):
        status = f"interrupted by {name_of(interrupts.received)}"
    opened[0].record.update({"status": status})


def _fail_if_expected(error: BaseException, opened: list[Run], interrupts: Interrupts) -> None:
    """End the process with one line, unless ``error`` is a fault of this package."""
    if os.environ.get("DSCHAT_LORA_TRACEBACK"):
        return
    words = error_message(error)
    if interrupts.received and isinstance(error, Exception):
        words = (
            f"stopped by {name_of(interrupts.received)}; what was learnt since the last "
            f"checkpoint is not saved: {words}"
        )
    if isinstance(error, ValueError):
        if opened and opened[0].directory is not None and rank() == 0:
            abandon_directory(opened[0].directory)
        fail(words)
    if isinstance(error, KeyboardInterrupt):
        fail("stopped by SIGINT", code=130)
    if isinstance(error, torch.OutOfMemoryError):
        who = f"rank {rank()}: " if world_size() > 1 else ""
        fail(who + words, code=1, from_any_rank=True)
    if isinstance(error, OSError | SafetensorError) or _lost_others(error):
        fail(words, code=1)


def _lost_others(error: BaseException) -> bool:
    """Whether rank 0, which says why, has left this rank alone."""
    lost = ("Connection closed by peer", "Connection reset by peer")
    return rank() > 0 and isinstance(error, RuntimeError) and any(t in str(error) for t in lost)


def _board(config: StageConfig, directory: Path) -> Path | None:
    """Where TensorBoard files go, if they are wanted."""
    if config.run.report_to != "tensorboard":
        return None
    return Path(config.run.tensorboard_path or directory / "tensorboard")
