"""TensorBoard, Weights & Biases and Trackio, which get the numbers of metrics.jsonl."""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from dschat_lora.config.staging import write_whole
from dschat_lora.report.directory import read_object
from dschat_lora.report.log import Sink, numbers_of
from dschat_lora.report.terminal import note

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Of an output directory: what a tracker calls the run, so that a resumed one goes on in it.
TRACKERS_FILE = "trackers.json"
PROJECT = "dschat_lora"


class NamedRun(Protocol):
    """A run of wandb or trackio."""

    def log(self, numbers: dict[str, float], step: int | None = None) -> object: ...
    def finish(self) -> object: ...


def _replay(tracker: Sink, lines: Sequence[bytes], *, first: int) -> None:
    """Add the numbers of lines from step ``first`` on."""
    for line in lines:
        record = json.loads(line)
        if record["step"] >= first:
            tracker.add(record["step"], numbers_of(record["kind"], record))


@dataclass
class TensorBoard:
    """Event files in a directory.

    Steps that are redone are purged. Those of ``first`` itself are repeated: an evaluation after it
    may have to be discarded, and TensorBoard discards whole steps only.
    """

    directory: Path
    _writer: "SummaryWriter | None" = field(default=None, init=False)

    def begin(self, lines: Sequence[bytes], *, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an optional extra

        if self._writer is not None:
            self._writer.close()
        threading.excepthook = _print_unless_disk_error
        self._writer = SummaryWriter(str(self.directory), purge_step=first or None)
        _replay(self, lines, first=first)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        assert self._writer is not None, "it has begun"
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        threading.excepthook = threading.__excepthook__
        if self._writer is not None:
            self._writer.close()


def _print_unless_disk_error(failed: threading.ExceptHookArgs) -> None:
    """Keep TensorBoard's thread from printing an error that the next call here will raise."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


@dataclass
class RunTracker:
    """A library that keeps runs by name: wandb or trackio, with its own environment variables.

    A resumed run goes on in the run of the library that ``TRACKERS_FILE`` names; steps that are
    redone stand there twice. An error of the library after the start is said once, and ends the
    tracking, not the training.
    """

    name: str  # of the library
    directory: Path  # output directory
    config: Mapping[str, Any]  # options of the run
    _run: NamedRun | None = field(default=None, init=False)

    def begin(self, lines: Sequence[bytes], *, first: int) -> None:
        if self._run is not None:
            return  # it goes on
        path = self.directory / TRACKERS_FILE
        known = read_object(path)
        identity = known.get(self.name) if first else None
        start = {"wandb": _start_wandb, "trackio": _start_trackio}[self.name]
        own = identity or f"{self.directory.name or 'run'}-{uuid4().hex[:8]}"
        try:
            self._run = start(own, self.directory, dict(self.config))
        except Exception as error:
            raise ValueError(
                f"--report_to {self.name} cannot start a run: {' '.join(str(error).split())}"
                + ("; WANDB_MODE=offline logs to disk" if self.name == "wandb" else "")
            ) from error
        write_whole(path, json.dumps({**known, self.name: own}) + "\n")
        if identity is None:
            _replay(self, lines, first=0)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        if numbers and self.name == "wandb":
            self._try(lambda run: run.log({**numbers, "step": step}))
        elif numbers:
            self._try(lambda run: run.log(dict(numbers), step=step))

    def flush(self) -> None:
        """Both libraries write by themselves."""

    def close(self) -> None:
        self._try(lambda run: run.finish())

    def _try(self, use: Callable[[NamedRun], object]) -> None:
        if self._run is None:
            return
        try:
            use(self._run)
        except Exception as error:  # noqa: BLE001 - whatever a tracker lacks, training goes on
            self._run = None
            note(f"--report_to {self.name} failed and was turned off: {error!r}")


def _start_wandb(identity: str, directory: Path, config: dict[str, Any]) -> NamedRun:
    import wandb  # an optional extra

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=identity,
        name=os.environ.get("WANDB_NAME", identity),
        dir=str(directory),
        resume="allow",
        config=config,
        settings=wandb.Settings(console="off"),
    )
    # A resumed run may redo steps, and wandb's own count only rises.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    named: NamedRun = run
    return named


def _start_trackio(identity: str, directory: Path, config: dict[str, Any]) -> NamedRun:
    import trackio  # an optional extra

    run: NamedRun = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=identity,
        resume="allow",
        config=config,
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return run
