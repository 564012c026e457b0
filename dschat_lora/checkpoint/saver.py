"""Background saving of a run's checkpoints, each of which appears complete or not at all."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from torch import Tensor

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.history import STATE_FILE, rotate, step_directory
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.checkpoint.staging import staged_directory
from dschat_lora.checkpoint.tensors import save_tensors

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
                        reason = "was given up: its tensors did not all come"
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
