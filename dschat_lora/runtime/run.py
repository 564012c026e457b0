"""A run from its first rank joining to how it ended: directory, log and record."""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.config.addons import groups_of, load, provided, through_addons
from dschat_lora.config.options import build_config, command_line, flatten, typed_options
from dschat_lora.config.stages import StageConfig
from dschat_lora.config.staging import occupied
from dschat_lora.engine import failure_detection
from dschat_lora.engine.distributed import (
    broadcast_string,
    check_same,
    form_context,
    form_grid,
    on_rank_zero,
    rank,
    world_size,
)
from dschat_lora.engine.process_group import init_distributed, shutdown
from dschat_lora.report.log import RunLog, Sink
from dschat_lora.report.record import RunRecord, circumstances
from dschat_lora.report.terminal import error_message
from dschat_lora.report.texts import clock
from dschat_lora.runtime.caller import NOBODY, Caller, Observer, is_callers
from dschat_lora.runtime.directory import RunDirectory
from dschat_lora.runtime.resume import options_with_code, resumes_in_place
from dschat_lora.runtime.signals import Interrupts, Stopped, name_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dschat_lora.runtime.resume import Resumable

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
ConfigT_co = TypeVar("ConfigT_co", covariant=True)
StageT = TypeVar("StageT", bound=StageConfig)
ResumableT = TypeVar("ResumableT", bound="Resumable")

# Endings of options that hosts may differ in: where they read and write.
_PLACES = (
    *("_path", "chat_template", "_dir", "_file", "_config", "_dataset_name", "_checkpoint"),
    "local_rank",
)


@dataclass(frozen=True)
class OpenRun(Generic[ConfigT_co]):
    """Where a run writes, its log and its record. Every rank holds one; rank 0's is active."""

    stage: str  # its name
    config: ConfigT_co  # as resolved for every rank
    directory: Path | None  # None for a dry run
    log: RunLog
    record: RunRecord
    observers: Sequence[Observer] = ()  # of rank 0
    caller: Caller = NOBODY
    interrupts: Interrupts = field(default_factory=Interrupts)
    # what has to happen, or to be said, before the log is closed
    closing: ExitStack = field(default_factory=ExitStack)

    def tell_end(self, *, quiet: bool = False) -> None:
        """Tell the observers that the record says how the run ended."""
        for each in self.observers:
            each.end(quiet=quiet)


@dataclass
class Ending:
    """What the end of a run needs: how to record it, and what to take back after a mistake."""

    run: OpenRun[object] | None = None
    directory: RunDirectory | None = None  # of rank 0
    closing: ExitStack = field(default_factory=ExitStack)


@contextmanager
def open_run(
    config: StageT, *, check: Callable[[StageT], StageT], caller: Caller = NOBODY
) -> Iterator[OpenRun[StageT]]:
    """Join the process group, resolve the config, claim the directory and open the log.

    How the run ends is recorded. ``check`` is what checked the config, for ranks that wait for
    rank 0 to resolve a resumed run. A run that a callback stopped ends the block without an error.
    """
    with recorded_ending() as ending:
        name = config.stage
        note = init_distributed()
        config = through_addons(resolved_together(config, check), "on_all_ranks")
        failure_detection.set_timeout(config.run.distributed_timeout)
        form_grid(config.parallel.tensor_parallel_size)
        form_context(config.parallel.context_parallel_size)
        torch.manual_seed(stream_seed("build", config.run.seed))
        earlier = resumes_in_place(config)
        directory, sinks = None, list[Sink]()
        if not config.run.dry_run:
            directory = claim_together(ending, config, name, temporary=caller.in_python)
            for own in groups_of(config, "sinks"):
                sinks += own.sinks(directory, flatten(config))
        with open_files(
            config, directory, ending, name=name, earlier=earlier, sinks=sinks, caller=caller
        ) as run:
            if note is not None:
                run.log.say(f"  note         {note}")
            yield run


def resolved_together(config: ResumableT, check: Callable[[ResumableT], ResumableT]) -> ResumableT:
    """Rank 0's config on every rank, where a checkpoint decided it; call on every rank."""
    if not config.run.resume_from_checkpoint:
        return config
    mine = {"options": typed_options(config), "checkpoint": config.checkpoint}
    resolved = json.loads(broadcast_string(json.dumps(mine)))
    if rank() == 0:
        return config
    config = build_config(type(config), resolved["options"])
    return check(replace(config, checkpoint=resolved["checkpoint"]))


def claim_together(
    ending: Ending, config: "Resumable", name: str, *, temporary: bool = False
) -> Path:
    """The directory that the run ``name`` may write to; call on every rank.

    Where none is given it is one of output/, or a ``temporary`` one of this process.
    """
    given, resumes = config.run.output_dir, config.run.resume_from_checkpoint

    def claim() -> RunDirectory:
        if given is None and temporary:
            claimed = RunDirectory.temporary(name)
        elif given is not None and resumes_in_place(config):
            claimed = RunDirectory.reopen(given)
        else:
            take = RunDirectory.restart if resumes == "auto" else RunDirectory.claim
            claimed = take(given, name=name)
        ending.closing.enter_context(occupied(claimed.path))
        return claimed

    ending.directory = claimed = on_rank_zero(claim)
    return Path(broadcast_string("" if claimed is None else str(claimed.path)))


@contextmanager
def open_files(
    config: ConfigT,
    directory: Path | None,
    ending: Ending,
    *,
    name: str,
    earlier: bool,
    sinks: Sequence[Sink] = (),
    caller: Caller = NOBODY,
) -> Iterator[OpenRun[ConfigT]]:
    """Open the log and the record, which says at the end that the run is finished.

    A dry run has no directory and writes nothing. If ``earlier``, log and record of an earlier run
    stay until it goes on. Call on every rank.
    """
    check_same(
        lambda: {
            f"--{name}": str(value)
            for name, value in flatten(config).items()
            if not name.endswith(_PLACES)
        },
        remedy="start all processes with the same options",
    )
    active = rank() == 0
    verbose = bool(flatten(config).get("verbose"))
    opened = on_rank_zero(
        lambda: RunLog(directory, active=True, sinks=sinks, earlier=earlier, verbose=verbose)
    )
    with opened or RunLog(None, active=False) as log:
        record = RunRecord(
            directory or Path(), active=active and directory is not None, earlier=earlier
        )
        record.update({"stage": name, "status": "running", **circumstances()})
        record.update({"world_size": world_size(), "config": flatten(config)})
        if directory is not None:
            passing = caller.in_python and flatten(config).get("output_dir") is None
            hint = "; temporary, deleted when Python exits; output_dir= keeps it" if passing else ""
            log.say(f"output: {directory} (started {_now()}{hint})")
        observers: list[Observer] = []
        if active and directory is not None:
            observers = [load(path)(directory, log) for path in provided("observer").values()]
        log.callbacks = (*observers, *caller.callbacks)
        run = ending.run = OpenRun(name, config, directory, log, record, observers, caller)
        failure_detection.on_loss(lambda words: _recovery_message(run, words))
        with run.closing:
            yield run
        on_rank_zero(log.sync)
        if directory is not None:
            log.say(f"finished {_now()} after {clock(log.position['seconds'])}")
    record.update({"status": "finished"})
    on_rank_zero(record.check)
    run.tell_end()


def _now() -> str:
    """Date and time here, for a person."""
    return time.strftime("%Y-%m-%d %H:%M")


@contextmanager
def recorded_ending() -> Iterator[Ending]:
    """Record how the run inside the block ends, then leave the process group.

    Processes that are several leave it in order at the end of a run, and where it was told to stop;
    after an error that could wait for ranks that are gone.
    """
    ending = Ending()
    with ending.closing:
        try:
            yield ending
        except BaseException as error:
            _record_error(error, ending)
            if isinstance(error, Stopped) or world_size() == 1:
                _leave_group(error)
            if isinstance(error, Stopped) and not error.code:
                return  # by a callback
            signal = ending.run.interrupts.received if ending.run is not None else 0
            if signal and isinstance(error, ValueError | OSError):
                kind = ValueError if isinstance(error, ValueError) else OSError
                raise kind(
                    f"stopped by {name_of(signal)}; progress since the last checkpoint is not "
                    f"saved: {error_message(error)}"
                ) from error
            raise
        shutdown()


def _record_error(error: BaseException, ending: Ending) -> None:
    """Record what ended the run; after a mistake, its directory is taken back."""
    run = ending.run
    if not isinstance(error, Stopped):
        if isinstance(error, Exception) and not isinstance(error, ValueError | OSError):
            failure_detection.wait_for_lost_peer(error)
        if run is not None and run.record.is_open:
            run.record.update({"status": _status(error, run.interrupts.received)})
        mistake = isinstance(error, ValueError) and run is not None
        # By its exit code another process made a mistake, which ends this one, too.
        mistake = mistake or (isinstance(error, SystemExit) and error.code == 2)
        if ending.directory is not None and mistake:
            ending.directory.abandon()
    if run is not None and run.record.is_open and run.log.has_lines:
        run.tell_end(quiet=True)  # another run's files stay


def _leave_group(error: BaseException) -> None:
    """Leave the process group in order, without the frames of ``error``; call on every rank.

    What the frames of the stage hold, engines above all, must not outlive the group. Those that are
    cleared still hold their closures, so that the traceback of an error that one line says is cut.
    A notebook shows the arguments in frames of the caller's code, which are kept.
    """
    cuts = isinstance(error, SystemExit | KeyboardInterrupt | ValueError | OSError)
    context: BaseException | None = error
    while context is not None and not os.environ.get("DSCHAT_LORA_TRACEBACK"):
        link = context.__traceback__
        while link is not None:
            if not is_callers(link.tb_frame):
                with suppress(RuntimeError):  # it goes on
                    link.tb_frame.clear()
            after = link.tb_next
            if cuts:
                link.tb_next = None
            link = after
        context = context.__context__
    shutdown()


def _recovery_message(run: "OpenRun[DataclassInstance]", words: str | None) -> str:
    """Record that other processes ended the run; what of it is saved, and how to go on."""
    if run.record.is_open:
        run.record.update({"status": f"failed: {words}"})
    if run.directory is None or not run.directory.is_dir():
        return ""  # a dry run, or another host's disk
    saved = checkpoints_of(run.directory)
    if not saved:
        return "no checkpoint was saved"
    options = {"output_dir": run.directory, "resume_from_checkpoint": "latest"}
    typed = command_line(options | options_with_code(type(run.config), flatten(run.config)))
    return f"last checkpoint {saved[0].name}; resume with {shlex.join(typed)}"


def _status(error: BaseException, signal: int) -> str:
    """How a run ended by ``error``, after the ``signal`` or none (0), in its record."""
    if signal and isinstance(error, SystemExit):
        return f"interrupted by {name_of(signal)}"
    if isinstance(error, KeyboardInterrupt):  # before the first step
        return "interrupted by SIGINT"
    return f"failed: {type(error).__name__}: {error}"
