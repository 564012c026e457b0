"""Work on many tasks by several processes, with the results in order."""

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

from dschat_lora.data.template_process import render_here

Task = TypeVar("Task")
Result = TypeVar("Result")
TASKS_PER_WORKER = 3  # that wait or are worked on, so that memory does not grow with their number
GARBAGE_THRESHOLD = 100_000  # new objects of a worker between two searches for garbage


def usable_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, workers: int
) -> Iterator[Result]:
    """``function(task)`` of each task, in order; a single task needs no other process.

    Raises:
        ChildProcessError: if one of the processes is killed.
    """
    rest = iter(tasks)
    first = list(islice(rest, 2))
    with ordered_map(function, workers=workers if len(first) == 2 else 1) as mapped:
        yield from mapped(chain(first, rest))


@contextmanager
def ordered_map(
    function: Callable[[Task], Result], *, workers: int
) -> Iterator[Callable[[Iterable[Task]], Iterator[Result]]]:
    """A function that maps tasks by processes, in order; it may be called several times at once.

    What ``function`` raises is raised here, that of the first task before that of later ones. The
    other processes end with this one, however that ends, and a ``map`` raises ChildProcessError if
    one of them is killed.
    """
    if workers <= 1:
        yield partial(map, function)
        return
    # A forked worker has the tokenizer already and imports nothing.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    with (
        _single_threaded_tokenizers(),
        ProcessPoolExecutor(
            workers, context, initializer=_set_function, initargs=(function,)
        ) as pool,
    ):

        def mapped(tasks: Iterable[Task]) -> Iterator[Result]:
            waiting: deque[Future[Result]] = deque()
            try:
                for task in tasks:
                    waiting.append(pool.submit(_call, task))
                    if len(waiting) >= TASKS_PER_WORKER * workers:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            except BrokenProcessPool as error:
                raise ChildProcessError(
                    "a process that prepares data was killed, perhaps out of memory; "
                    f"--preprocessing_num_workers {max(1, workers // 2)} needs less"
                ) from error

        try:
            yield mapped
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker: dict[str, Callable[[Any], Any]] = {}  # of a worker process: the function of all its tasks


def _set_function(function: Callable[[Any], Any]) -> None:
    def end_with_parent() -> None:  # which no queue would tell
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([parent.sentinel])
        os._exit(1)

    # Ctrl-C reaches every process of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    render_here()
    _worker["function"] = function
    # What was imported is neither searched for garbage nor, by that, copied; the lists of a task's
    # rows, of which none is garbage before its end, are seldom searched.
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)


def _call(task: Any) -> Any:
    return _worker["function"](task)


@contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """Keep tokenizers from starting threads, which do not survive a fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
