"""Decoding steps captured as CUDA graphs, and what keeps them from being captured."""

import threading
import warnings
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from dschat_lora.generation.kv_cache import in_shards
from dschat_lora.lora.parallel import group_of

DecodeStep = Callable[[], None]
MOST_SHAPES = 64  # that are recorded at a time, as each takes memory
_WAIT = "called a synchronizing CUDA operation"  # how torch warns of one
_failed = False  # a capture of this process


def graphs_for(model: PreTrainedModel) -> Callable[[DecodeStep], DecodeStep] | None:
    """What captures steps of a model on a GPU; None where no capture would succeed.

    That is for collectives, which are not captured, and in a process in which one has failed.
    """
    return None if _failed or in_shards(model) or group_of(model) is not None else cuda_graphs()


def has_failed() -> bool:
    """Whether a capture has, in this process; graphs of before it are then not to be replayed."""
    return _failed


def cuda_graphs() -> Callable[[DecodeStep], DecodeStep]:
    """A function that captures a step as a CUDA graph and returns its replay, without running it.

    Replays follow one another, so graphs share one memory pool, until none of them is left. An
    exception is passed on; after one, steps are returned as they are, in the whole process.
    """
    pool, alive = torch.cuda.graph_pool_handle(), WeakSet[torch.cuda.CUDAGraph]()

    def record(step: DecodeStep) -> DecodeStep:
        global _failed
        nonlocal pool
        if _failed:
            return step
        if not alive:  # torch takes a pool that its last graph has left for freed
            pool = torch.cuda.graph_pool_handle()
        graph, stream, begun = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), False
        try:
            # Other threads may use CUDA meanwhile: those that pin memory, a user's own.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                begun = True
                step()
        except BaseException:
            _failed = True
            torch.cuda.set_stream(stream)
            # Up to 2.12 a generator's state takes such a capture for unfinished, and serves neither
            # what draws next nor graphs of before (pytorch #171263).
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            if begun:
                _abandon(graph, pool)
            raise
        alive.add(graph)
        replay: DecodeStep = graph.replay
        return replay

    return record


class RecordedSteps:
    """Steps by their shape: the first of each runs as it is, is recorded then, and replayed.

    Args:
        record: turns a step of one shape into its replay, as what :func:`graphs_for` returns does;
            None runs every step anew.
        of: what the steps do, for a warning where they cannot be recorded.
    """

    def __init__(
        self, record: Callable[[DecodeStep], DecodeStep] | None, *, of: str = "decoding"
    ) -> None:
        self._record, self._of = record, of
        self._recorded: dict[Hashable, DecodeStep] = {}
        self._tried: set[Hashable] = set()

    def run(self, shape: Hashable, step: DecodeStep, device: torch.device) -> None:
        """Run ``step``, or replay what was recorded of one of its shape."""
        if self._record is not None and has_failed():
            self._give_up()
        if self._record is None or shape in self._recorded:
            self._recorded.get(shape, step)()
        elif shape not in self._tried:
            # What a graph contains has to have run before: libraries set themselves up then. It
            # also shows whether the step can be captured.
            self._tried.add(shape)
            if device.type != "cuda":
                step()
            elif (place := run_watching(step)) is not None:
                self._give_up(f"the model waits for the GPU at {place}")
        else:
            if len(self._recorded) == MOST_SHAPES:
                self._recorded.clear()
            try:
                self._recorded[shape] = self._record(step)
            except RuntimeError as error:
                self._give_up(first_cause(error))
            self._recorded.get(shape, step)()

    def forget(self) -> None:
        """Replay nothing of before: tensors that it refers to have moved."""
        self._recorded.clear()
        self._tried.clear()

    def _give_up(self, reason: str | None = None) -> None:
        if reason is not None:
            warnings.warn(f"{self._of} without CUDA graphs, more slowly: {reason}", stacklevel=2)
        self._record = None
        self.forget()


def _abandon(graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
    """Give up a graph's hold on its pool, and have the allocator know that its capture is over.

    Where the end of a capture fails, torch does neither: up to 2.12 the allocator takes it for
    unfinished (pytorch #180395), up to 2.13 the memory is never released (pytorch #190308).
    """
    with suppress(RuntimeError):
        graph.pool()
        return  # the capture came to its end, and what failed is not CUDA
    device, calls = torch.cuda.current_device(), torch._C
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the last in 2.6
    with suppress(RuntimeError):  # it has ended
        next(getattr(calls, name) for name in names if hasattr(calls, name))(device, pool)
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        calls._cuda_releasePool(device, pool)


def first_cause(error: BaseException) -> str:
    """The line that says what kept a step from being captured.

    The exception that ends the capture hides the one that broke it.
    """
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def run_watching(step: DecodeStep) -> str | None:
    """Run a step on a GPU; the first line of code that waits for it, as "file:line", if any does.

    A step that waits cannot be captured. torch sees most waits, not all.
    """
    places: list[str] = []
    mode, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    show = warnings.showwarning

    def note(message: Any, category: Any, file: str, line: int, *rest: Any) -> None:
        if _WAIT not in str(message):
            show(message, category, file, line, *rest)
        elif threading.get_ident() == thread:
            places.append(f"{Path(file).name}:{line}")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # is a prototype
        warnings.filterwarnings("always", _WAIT)
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode(1)
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return places[0] if places else None
