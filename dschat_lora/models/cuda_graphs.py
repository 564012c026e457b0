"""Steps captured as CUDA graphs, and what keeps them from being captured."""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

Step = Callable[[], None]
Record = Callable[[Step], Step]  # gives the replay of a step
_WAIT = "called a synchronizing CUDA operation"  # how torch warns of one
_failed = False  # a capture of this process


def has_failed() -> bool:
    """Whether a capture has, in this process; graphs of before it are then not to be replayed."""
    return _failed


def cuda_graphs() -> Record:
    """A function that captures a step as a CUDA graph and returns its replay, without running it.

    Replays follow one another, so graphs share one memory pool, until none of them is left. An
    exception is passed on; after one, steps are returned as they are, in the whole process.
    """
    pool, alive = torch.cuda.graph_pool_handle(), WeakSet[torch.cuda.CUDAGraph]()

    def record(step: Step) -> Step:
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
        replay: Step = graph.replay
        return replay

    return record


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


def run_watching(step: Step) -> str | None:
    """Run a step on a GPU; the first line of code that waits for it, as "file:line", if any does.

    A step that waits cannot be captured. torch sees most waits, not all.
    """
    places: list[str] = []
    mode, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
    show = warnings.showwarning

    def note(
        message: Warning | str, category: type[Warning], file: str, line: int, *rest: Any
    ) -> None:
        if _WAIT not in str(message):
            show(message, category, file, line, *rest)
        elif threading.get_ident() == thread or torch._C._current_graph_task_id() >= 0:
            # The latter in a backward pass, which has a thread of its own.
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
