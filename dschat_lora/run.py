"""A run from its first rank joining to how it ended: directory, log and record."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dschat_lora.cli.options import fail, flatten
from dschat_lora.config import SupervisedConfig
from dschat_lora.engine.distributed import device, init_distributed, rank, shutdown, world_size
from dschat_lora.report.directory import abandon_directory, claim_directory
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord, environment


@dataclass(frozen=True)
class Output:
    """Where a run writes, its log and its record. Every rank holds one; rank 0's is active."""

    directory: Path
    log: RunLog
    record: RunRecord


@contextmanager
def open_run(config: SupervisedConfig, *, name: str) -> Iterator[Output]:
    """Join the process group, open the output directory, and record how the run ends.

    A ValueError, a user's mistake that shows only now, ends the process as one line.

    Args:
        config: the stage's checked config.
        name: of the stage, such as ``sft``; also of the default directory.
    """
    record: RunRecord | None = None
    directory: Path | None = None
    try:
        init_distributed()
        # Dropout alone draws from it: each rank another stream, the same in every run.
        torch.manual_seed((config.run.seed * 65_537 + rank()) % 2**63)
        if config.run.dry_run:
            with RunLog(None, active=rank() == 0) as log:
                yield Output(Path(), log, RunRecord(Path(), active=False))
            shutdown()
            return
        mine = claim_directory(config.run.output_dir, name=name) if rank() == 0 else ""
        directory = Path(_from_rank_zero(str(mine)))
        record = RunRecord(directory, active=rank() == 0)
        record.update({"stage": name, "status": "running", **environment()})
        record.update({"world_size": world_size(), "config": flatten(config)})
        with RunLog(directory, active=rank() == 0, tensorboard=_board(config, directory)) as log:
            log.say(f"output: {directory}")
            yield Output(directory, log, record)
        record.update({"status": "finished"})
    except BaseException as error:
        if record is not None:
            record.update({"status": f"failed: {type(error).__name__}: {error}"})
        if isinstance(error, ValueError) and not os.environ.get("DSCHAT_LORA_TRACEBACK"):
            if directory is not None and rank() == 0:
                abandon_directory(directory)
            fail(str(error))
        raise
    # Not after a failure: leaving the group can wait for ranks that are gone.
    shutdown()


def _board(config: SupervisedConfig, directory: Path) -> Path | None:
    """Where TensorBoard files go, if they are wanted."""
    if config.run.report_to != "tensorboard":
        return None
    return Path(config.run.tensorboard_path or directory / "tensorboard")


def _from_rank_zero(text: str) -> str:
    box = [text]
    dist.broadcast_object_list(box, 0, device=device())
    return box[0]
