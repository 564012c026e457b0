"""When a run saves its state, and the thread that writes it."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import Tensor

from dschat_lora.algos.tensors import check_finite, is_finite
from dschat_lora.checkpoint.history import (
    STATE_FILE,
    quarantine_checkpoints,
    read_state,
    rotate,
    step_directory,
)
from dschat_lora.checkpoint.manifest import read_manifest, write_manifest
from dschat_lora.checkpoint.tensors import TensorFiles, save_tensors
from dschat_lora.config.addons import owners
from dschat_lora.config.groups import RunConfig
from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.stages import StageConfig
from dschat_lora.config.staging import check_place, staged_directory
from dschat_lora.data.digests import DataIdentity
from dschat_lora.engine.distributed import (
    broadcast_string,
    max_over_ranks,
    on_rank_zero,
    rank,
    world_size,
)
from dschat_lora.engine.rendezvous import is_one_host
from dschat_lora.engine.state import EngineState
from dschat_lora.lora.rates import adapter_rates
from dschat_lora.report.log import RunLog, jsonable
from dschat_lora.report.terminal import columns, error_message, fitted_command
from dschat_lora.runtime.resume import (
    check_identity,
    options_to_keep,
    options_with_code,
    resumes_in_place,
    run_of,
)
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.signals import Stopped, name_of

if TYPE_CHECKING:
    from dschat_lora.runtime.resume import Resumable


# Training waits this share of its time for the disk, were it saved at the default interval:
# a checkpoint is then nearly always complete before the next step, whatever the interval.
PATIENCE = 0.01
#: random streams of a run: each is a pure function of these, so that none has a state
STREAMS = {"epoch": ["seed", "epoch"], "dropout": ["seed", "step", "rank"]}


class Stateful(Protocol):
    """An object with state that is no tensor, saved and restored with the run."""

    def state(self) -> dict[str, Any]:
        """As JSON; the same on every rank."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""


class Checkpointer:
    """The checkpoints of one run, for any stage. Call methods on every rank.

    The trained tensors come from ``engines``, by the name under which they are filed, everything
    else from ``parts``. ``identity`` says what the state belongs to (model, tokenizer, data and
    rows of a step) and is complete on rank 0. ``on_checkpoint`` is called on every rank with the
    step of a checkpoint, to write more.
    """

    def __init__(
        self,
        run: OpenRun[StageConfig],
        *,
        engines: Mapping[str, EngineState],
        parts: Mapping[str, Stateful],
        identity: Mapping[str, Any],
        on_checkpoint: Callable[[int], None] | None = None,
    ) -> None:
        self._run, self._engines, self._parts = run, engines, parts
        self._on_checkpoint = on_checkpoint
        self._identity = {**identity, "streams": STREAMS}
        self._options = run.config.run
        assert run.directory is not None, "a dry run keeps nothing"
        self._directory = run.directory
        self._saver: Saver | None = None
        if rank() == 0:
            self._saver = Saver(
                self._directory, keep=self._options.save_total_limit, before_commit=run.log.sync
            )
            # Whatever ends the run, a checkpoint that is being written is finished.
            run.closing.callback(self._saver.drain)
        self._begun = self._last_time = time.monotonic()
        self._first_step = self._last_step = 0
        self._resumed_from: Path | None = None
        self._is_owed = False
        self._saves, self._seconds = 0, 0.0

    def restore(self, *, num_steps: int = 0) -> None:
        """Restore the run's checkpoint, if it has one.

        Raises:
            ValueError: if the checkpoint is of another model, tokenizer or data, or after more than
                the planned ``num_steps`` (0: no plan). The earlier run is as it was then.
        """
        config = self._run.config
        if not config.checkpoint:
            return
        checkpoint = Path(config.checkpoint)
        accepts = self._options.accept_changed_data
        on_rank_zero(
            lambda: check_identity(
                checkpoint, self._identity, num_steps=num_steps, accepts_changed_data=accepts
            )
        )
        state = json.loads(
            broadcast_string(json.dumps(read_state(checkpoint)) if rank() == 0 else "")
        )
        files = read_manifest(checkpoint, kind="checkpoint")["files"] if rank() == 0 else ()
        for name, engine in self._engines.items():
            # Rank 0 alone reads tensors.
            own = TensorFiles([checkpoint / f for f in files if f.startswith(f"{name}-")])
            engine.load(state["engines"][name], own.read)
        for name, part in self._parts.items():
            if name in state["parts"]:  # an earlier version may have kept fewer
                part.restore(state["parts"][name])
        self._first_step = self._last_step = state["step"]
        self._begun = self._last_time = time.monotonic()
        self._resumed_from = checkpoint
        on_rank_zero(lambda: take_over(self._run, state))

    def requests(self) -> list[float]:
        """Requests to be summed over ranks: to stop, to save by time, to end for a failed disk."""
        told = self._run.interrupts.received > 0 or self._run.log.is_stopped
        if self._saver is None:
            return [float(told), 0.0, 0.0]
        waited = time.monotonic() - self._last_time
        due = 0 < self._options.save_minutes * 60 <= waited
        return [float(told), float(due), float(self._failure() is not None)]

    def is_stopping(self, requests: list[float], *, last: bool = False) -> bool:
        """Whether some rank was told to stop, or cannot go on.

        After the ``last`` step a callback's wish to stop is fulfilled. Call on every rank.
        """
        told, _, failed = requests
        if told and last and not failed:
            return max_over_ranks(float(self._run.interrupts.received)) > 0
        return told > 0 or failed > 0

    def is_due(self, step: int) -> bool:
        """Whether to save after so many steps, by their number."""
        interval = self._options.save_interval
        # An iteration of step 3 may pass over the very step.
        passed = interval > 0 and step // interval > self._last_step // interval
        return passed or self._is_owed

    def after_step(self, step: int, requests: list[float], *, skipped: bool, last: bool) -> bool:
        """Save if due, or end the run; whether anything was saved.

        A skipped step is saved at the end of a run alone: weights that give no finite gradient are
        not worth going back to.
        """
        _, due_by_time, failed = requests
        if failed:
            failure = self._failure()
            if failure is None:
                raise SystemExit(1)  # rank 0 says why
            raise self._explained(failure) from failure
        if self.is_stopping(requests, last=last):
            self.stop(step)
        saves = self._options.save_interval > 0 or self._options.save_minutes > 0
        wanted = self.is_due(step) or due_by_time > 0 or (last and saves)
        self._is_owed = wanted and skipped and not last
        if not wanted or self._is_owed or (step == self._last_step and not last):
            return False
        if step > self._last_step:
            self.save(step)
        if last:
            on_rank_zero(self._finish_writing)
            self._run.record.update(
                {"checkpoints": {"saved": self._saves, "seconds_in_training": self._seconds}}
            )
        return True

    def save(self, step: int) -> None:
        """Write a checkpoint, most of it after this returns."""
        start = time.monotonic()
        on_rank_zero(self._finish_writing)
        if self._on_checkpoint is not None:
            self._on_checkpoint(step)  # first: what a run goes on from has all that belongs to it
        state = state_to_keep(
            self._run.config,
            step,
            self._run.log,
            self._identity,
            engines={name: engine.facts() for name, engine in self._engines.items()},
            parts={name: part.state() for name, part in self._parts.items()},
        )
        tensors = {name: engine.tensors() for name, engine in self._engines.items()}
        if self._saver is not None:
            self._saver.save(step, tensors, state, patience=self._patience(step))
        else:
            for pairs in tensors.values():
                for _ in pairs:
                    raise AssertionError("tensors are rank 0's to write")
        self._last_step, self._last_time = step, time.monotonic()
        self._saves, self._seconds = self._saves + 1, self._seconds + self._last_time - start

    def stop(self, step: int, *, by: str = "a callback") -> NoReturn:
        """Save the steps since the last checkpoint, and end the run.

        ``by`` says who asked for it, where no signal did.

        Raises:
            Stopped: with the exit code of the signal, or 0 without one, when the checkpoint is
                complete.
        """
        number = int(max_over_ranks(float(self._run.interrupts.received)))
        self.save_rest(step, f"stopped by {name_of(number) if number else by}")
        if number:
            end_by_signal(self._run, number, step)
        self._run.record.update({"status": f"stopped by {by} at step {step}"})
        raise Stopped(0)

    def save_rest(self, step: int, why: str) -> str:
        """Save the steps since the last checkpoint; say, and return, ``why`` and how to go on."""
        if step > self._last_step:
            self.save(step)
        on_rank_zero(self._finish_writing)
        where = how_to_go_on(self._run)
        words = f"{why} after step {step}; {where if step else 'nothing was trained yet'}"
        head, _, command = words.partition("resume with: ")
        in_lines = columns() and command and self._run.caller.of_command
        shown = f"{head}resume with:\n{fitted_command(command, '  ')}" if in_lines else words
        self._run.log.say(shown)
        return words

    def broken_weight(self) -> str | None:
        """The first trained weight that is not finite, known to rank 0; call on every rank."""
        pairs = (pair for engine in self._engines.values() for pair in engine.tensors())
        broken = [key for key, tensor in pairs if not is_finite(tensor)]
        return broken[0] if broken else None

    def last_good(self) -> str:
        """The newest checkpoint, as a sentence."""
        if self._saver is None:
            return ""
        self._saver.drain()
        path = self._saver.committed or self._resumed_from
        if path is None:
            return "There is no checkpoint yet"
        try:
            check_place(path)
        except OSError:
            return f"The last checkpoint, {path.name}, was lost with it"
        return f"The newest valid checkpoint is {path}"

    def _patience(self, step: int) -> float:
        """Seconds to wait for the disk: few enough not to matter at the default interval."""
        per_step = (time.monotonic() - self._begun) / max(1, step - self._first_step)
        usual = RunConfig()
        return PATIENCE * min(usual.save_interval * per_step, usual.save_minutes * 60)

    def _failure(self) -> BaseException | None:
        written = self._saver.failure if self._saver is not None else None
        return written or self._run.log.failure or self._run.record.failure

    def _explained(self, failure: BaseException) -> BaseException:
        """The error with the checkpoint to go on from; a fault of ours as it is."""
        words = f"{error_message(failure)}. {self.last_good()}"
        if isinstance(failure, OSError):
            return OSError(words)
        return ValueError(words) if isinstance(failure, ValueError) else failure

    def _finish_writing(self) -> None:
        """Return when the checkpoint being written is complete; call on rank 0."""
        assert self._saver is not None
        try:
            self._saver.wait()
        except (OSError, ValueError) as error:
            raise self._explained(error) from error
        while self._saver.notes:
            self._run.log.say(f"  note         {self._saver.notes.pop()}")


def state_to_keep(
    config: "Resumable", step: int, log: RunLog, identity: Mapping[str, Any], **more: object
) -> dict[str, Any]:
    """What a checkpoint after ``step`` holds besides tensors, JSON-ready, with ``more`` of it."""
    roles = config.trained.values() if isinstance(config, StageConfig) else ()
    state: dict[str, Any] = jsonable(
        {
            "step": step,
            "identity": {
                name: value.digest.to_dict() if isinstance(value, DataIdentity) else value
                for name, value in identity.items()
            },
            "options": options_to_keep(config),
            "config": flatten(config) | adapter_rates(roles),
            "addons": owners(config),
            "log": log.position,
            **more,
        }
    )
    return state


def how_to_go_on(run: "OpenRun[Resumable]") -> str:
    """The command, or arguments in Python, that go on with a run whose state is saved."""
    if run.caller.in_python and not run.caller.of_command:
        return f'resume with: output_dir={str(run.directory)!r}, resume="latest"'
    code = command_line(options_with_code(type(run.config), flatten(run.config)))
    resumed = ("--output_dir", str(run.directory), "--resume_from_checkpoint", "latest")
    return f"resume with: {shlex.join([*_started_by(run.stage), *resumed, *code])}"


def _started_by(stage: str) -> list[str]:
    """The first words of the command that started this process and others of its host."""
    script, several = sys.argv[0], world_size() > 1
    processes = ["--num_gpus", str(world_size())] if several and is_one_host() else []
    if Path(script).name != "main.py":
        return ["dschat-lora", stage, *processes]
    return [*(["deepspeed", *processes] if several else ["python"]), script]


def end_by_signal(run: "OpenRun[Resumable]", number: int, step: int) -> NoReturn:
    """Record that a run was told to stop, and end it; call on every rank.

    Raises:
        Stopped: with the exit code of the signal.
    """
    run.record.update({"status": f"interrupted by {name_of(number)} at step {step}"})
    raise Stopped(128 + number, run.directory if step else None)


def take_over(run: "OpenRun[Resumable]", state: Mapping[str, Any]) -> None:
    """Bring log and record of a resumed run to where its checkpoint was saved; call on rank 0."""
    checkpoint = Path(run.config.checkpoint or "")
    in_place = resumes_in_place(run.config)
    origin = None if in_place else run_of(checkpoint)
    source = origin / "metrics.jsonl" if origin is not None else None
    if in_place and run.directory is not None:
        # First: a checkpoint must not outlive its lines of the log.
        rejected = map(Path, run.config.rejected)
        for path in quarantine_checkpoints(run.directory, after=state["step"], rejected=rejected):
            run.log.say(f"  note         set aside: {path}")
    run.log.rewind(**state["log"], step=state["step"], source=source)
    run.record.release()
    run.record.append("resumed", {"step": state["step"], "checkpoint": str(checkpoint)})


SHARD_BYTES = 2**30
Shard = tuple[str, dict[str, Tensor]]


class Saver:
    """Writes ``RUN/checkpoints/step-...`` on a thread of its own; rank 0 alone has one.

    At most three shards of tensors are in memory: being taken, waiting, and being written. Where
    the disk is slower than that, saving waits for it. An error is kept in ``failure`` for the
    training loop.
    """

    def __init__(self, run: Path, *, keep: int, before_commit: Callable[[], None]) -> None:
        """Keep the newest ``keep`` checkpoints, or all if 0.

        ``before_commit`` is called before a checkpoint takes its name, to sync files it relies on.
        """
        self._run, self._keep, self._before_commit = run, keep, before_commit
        self._task: Future[None] | None = None
        #: harmless failures, to be printed
        self.notes: list[str] = []
        #: newest checkpoint that is complete
        self.committed: Path | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why the last checkpoint could not be written; None if it was, or still is being."""
        return self._task.exception() if self._task is not None and self._task.done() else None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Iterator[tuple[str, Tensor]]],
        state: Mapping[str, Any],
        *,
        patience: float = 0.0,
    ) -> None:
        """Take ``tensors``, (key, CPU tensor) by part of the run, and JSON-ready ``state``.

        Returns when they are written, or after ``patience`` seconds while writing goes on.

        Raises:
            OSError: if this or the checkpoint before could not be written.
            ValueError: if a tensor is not finite.
        """
        self.wait()
        shards: Queue[Shard | None] = Queue(maxsize=1)
        task: Future[None] = Future()
        self._task = task
        # A daemon thread: the end of the process does not wait for the disk.
        Thread(target=self._work, args=(task, step, shards, dict(state)), daemon=True).start()
        complete = False
        try:
            for part, pairs in tensors.items():
                for shard in _shards(part, pairs):
                    _hand_over(shard, shards, task)
            complete = True
        finally:
            _hand_over(None if complete else ("", {}), shards, task)
        wait([task], timeout=patience)

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            OSError, ValueError: as :meth:`save`.
        """
        if self._task is not None:
            self._task.result()

    def drain(self) -> None:
        """Return when nothing is being written any more, however that ended."""
        if self._task is not None:
            wait([self._task])

    def _work(
        self, task: "Future[None]", step: int, shards: "Queue[Shard | None]", state: dict[str, Any]
    ) -> None:
        """Write, and set the result or exception of ``task``."""
        final = step_directory(self._run, step)
        try:
            with staged_directory(final) as staging:
                while (shard := shards.get()) is not None:
                    name, tensors = shard
                    if not name:
                        reason = "was abandoned: some of its tensors are missing"
                        raise InterruptedError(f"{final} {reason}")
                    for key, tensor in tensors.items():
                        check_finite(tensor, f"{final.name} was not written: {key}")
                    save_tensors(tensors, staging / name)
                text = json.dumps(state, indent=1) + "\n"
                (staging / STATE_FILE).write_text(text, encoding="utf-8")
                write_manifest(staging, kind="checkpoint")
                self._before_commit()
            self.committed = final
            try:
                rotate(self._run, keep=self._keep, newest=step)
            except OSError as error:
                # The run is safe; the user may want to free space.
                self.notes.append(f"an old checkpoint could not be deleted: {error}")
        except BaseException as error:  # noqa: BLE001
            task.set_exception(error)
        else:
            task.set_result(None)


def _shards(part: str, pairs: Iterator[tuple[str, Tensor]]) -> Iterator[Shard]:
    """Tensors in files of about ``SHARD_BYTES``."""
    shard: dict[str, Tensor] = {}
    size = number = 0
    for key, tensor in pairs:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            number += 1
            yield f"{part}-{number:05d}.safetensors", shard
            shard, size = {}, 0
        shard[key] = tensor
        size += tensor.nbytes
    if shard:
        yield f"{part}-{number + 1:05d}.safetensors", shard


def _hand_over(item: Shard | None, shards: "Queue[Shard | None]", task: "Future[None]") -> None:
    """Put into the queue, unless nobody takes from it any more."""
    while not task.done():
        try:
            shards.put(item, timeout=0.05)
        except Full:
            continue
        return
