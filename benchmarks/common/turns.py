"""Contenders in processes of their own that take turns: how they start, answer and are compared."""

import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import psutil
import torch

from benchmarks.common.report import print_table
from dschat_lora.engine.distributed import device
from dschat_lora.engine.process_group import shutdown
from dschat_lora.perf.throughput import synchronize

ANSWER_SECONDS = 600.0  # for a contender to be ready, or to take a turn
END_SECONDS = 3.0  # to remove what it has written
NOT_INSTALLED = "TRL or PEFT is not installed"


@dataclass(frozen=True)
class Work:
    """What a step or an iteration went through."""

    amount: int  # pairs, tokens without padding, or tokens of responses
    positions: int = 0  # with padding
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    idle_cpu_seconds: float = 0.0  # since its last step, while others took theirs
    generation_seconds: float | None = None


Context = SpawnContext | ForkServerContext


class Served(Protocol):
    """A contender; ``ready`` is what it says when it is built."""

    ready: Any


class Task(Protocol):
    """What all contenders are given."""

    @property
    def threads(self) -> int:
        """Of a CPU."""


@dataclass
class Runner:
    """A contender's process, and what its turns took.

    Attributes:
        ready: what the contender said when it was built.
        problem: why it does not run.
    """

    name: str
    process: Any  # as its context makes them, or None
    connection: Any
    ready: Any = None
    problem: str | None = None
    works: list[Work] = field(default_factory=list)
    peak_bytes: int | None = None

    def receive(self) -> Any:
        """Its next answer; None, and a problem noted, where it gives none."""
        try:
            if not self.connection.poll(ANSWER_SECONDS):
                raise TimeoutError(f"silent for {ANSWER_SECONDS:.0f} s")
            answer = self.connection.recv()
        except (EOFError, OSError) as error:
            answer = f"{type(error).__name__}: {error}"
        if isinstance(answer, str):
            self.problem = answer
            return None
        return answer

    def ask(self, method: str, *arguments: object) -> Any:
        """What a method of its contender returns."""
        self.connection.send((method, *arguments))
        return self.receive()


def serve(connection: Connection, build: Callable[..., Served], task: Task) -> None:
    """Build a contender, then call its methods that messages name, with their arguments.

    First its ``ready`` is sent. ``forget_peak`` and ``peak_bytes``, above what the imported
    libraries take, are answered besides. A text says that something failed.
    """
    torch.set_num_threads(task.threads)
    logging.disable(logging.WARNING)
    libraries = psutil.Process().memory_info().rss if not torch.cuda.is_available() else 0
    try:
        contender = build(task)
        connection.send(contender.ready)
        known = {"forget_peak": forget_peak, "peak_bytes": lambda: peak_bytes() - libraries}
        while True:
            method, *arguments = connection.recv()
            answer = (known.get(method) or getattr(contender, method))(*arguments)
            connection.send(True if answer is None else answer)
    except (EOFError, BrokenPipeError):  # nobody asks any more
        shutdown()
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}"[:500])
        raise


def make_context(preload: Sequence[str]) -> Context:
    """How processes start: on a CPU all with the same modules imported."""
    # A process that has looked for a GPU must not fork.
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def start(context: Context, name: str, build: Callable[..., Served], task: Task) -> Runner:
    """A process that serves what ``build`` makes of the task."""
    mine, its = context.Pipe()
    process = context.Process(target=serve, args=(its, build, task), daemon=True)
    process.start()
    its.close()
    return Runner(name, process, mine)


@contextmanager
def contenders(
    builders: Mapping[str, Callable[..., Served]], task: Task, *, optional: Sequence[str] = ()
) -> Iterator[list[Runner]]:
    """A process for each contender, within; those of TRL only where it and PEFT are installed.

    Args:
        builders: of contenders, by their names.
        task: of all of them.
        optional: modules that TRL's contenders import, so that their memory is a library's.
    """
    modules = {getattr(build, "func", build).__module__ for build in builders.values()}
    context = make_context([*modules, *(optional if has_trl() else ())])
    runners = [
        start(context, name, build, task)
        if has_trl() or not name.startswith("TRL")
        else Runner(name, None, None, problem=NOT_INSTALLED)
        for name, build in builders.items()
    ]
    try:
        yield runners
    finally:
        stop(runners)


def all_run(runners: Iterable[Runner]) -> bool:
    """Whether every contender worked that could be started."""
    return all(runner.problem in (None, NOT_INSTALLED) for runner in runners)


def has_trl() -> bool:
    """Whether TRL and PEFT are installed."""
    return all(find_spec(name) for name in ("trl", "peft", "datasets"))


def stop(runners: Sequence[Runner]) -> None:
    """Leave no process behind."""
    started = [runner for runner in runners if runner.process is not None]
    for runner in started:
        runner.connection.close()
    for runner in started:
        runner.process.join(END_SECONDS)
        runner.process.kill()
        runner.process.join()


def take_turns(runners: Sequence[Runner], *, rounds: int, seconds: float = math.inf) -> None:
    """A step of each in every round, after a first answer; there is one round at least.

    Args:
        runners: as :func:`contenders` gives them.
        rounds: at most.
        seconds: no round begins that would end later than so much after the first one began, if
            it took as long as the longest one so far.
    """
    for runner in runners:
        if runner.process is not None:
            runner.ready = runner.receive()
    first, longest = time.monotonic(), 0.0
    for number in range(rounds):
        begun = time.monotonic()
        if number and begun + longest > first + seconds:
            break
        for runner in runners:
            if runner.problem is None:
                work = runner.ask("step")
                runner.works += [work] if work is not None else []
        longest = max(longest, time.monotonic() - begun)
    for runner in runners:
        if runner.problem is None:
            runner.peak_bytes = runner.ask("peak_bytes")


def compared(runner: Runner, ours: Runner) -> dict[str, Any]:
    """A contender's medians, and in how many of our times it does as much, round by round."""
    works, peak = runner.works, runner.peak_bytes
    row = {"contender": runner.name, "problem": runner.problem, "rounds": len(works)}
    row["peak_mib"] = peak and peak / 2**20
    if not works:
        return row
    generation = [w.generation_seconds for w in works if w.generation_seconds is not None]
    amount = sum(work.amount for work in works)
    return row | {
        "amount": amount / len(works),
        "per_second": median(work.amount / work.seconds for work in works),
        "per_cpu_second": median(work.amount / work.cpu_seconds for work in works),
        "seconds": median(work.seconds for work in works),
        "cpu_seconds": median(work.cpu_seconds for work in works),
        "generation_seconds": median(generation) if generation else None,
        "positions_each": sum(work.positions for work in works) / amount,
        "times_ours": times_ours(runner, ours, "seconds"),
        "cpu_times_ours": times_ours(runner, ours, "cpu_seconds"),
        "works": [asdict(work) for work in works],
    }


def print_compared(what: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each of the rows, and for each problem."""
    names = {
        **{"amount": "a step", "per_second": "per s", "per_cpu_second": "per CPU s"},
        **{"seconds": "s", "generation_seconds": "generation", "positions_each": "positions each"},
        **{"times_ours": "x ours", "cpu_times_ours": "x CPU time", "peak_mib": "peak MiB"},
    }
    table = [[row["contender"], *(row.get(name) for name in names)] for row in rows]
    print_table([what, *names.values()], table)
    for row in rows:
        if row["problem"]:
            print(f"{row['contender']}: {row['problem']}")


def times_ours(runner: Runner, ours: Runner, measure: str) -> dict[str, float]:
    """In how many times ours a contender does as much, round by round: median and quartiles.

    Args:
        runner: of the contender, after its turns.
        ours: of ours.
        measure: which of their seconds.
    """
    rounds = zip(runner.works, ours.works, strict=False)
    return spread(
        [
            (getattr(its, measure) / its.amount) / (getattr(own, measure) / own.amount)
            for its, own in rounds
        ]
    )


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = (
        quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": middle, "quartile_1": low, "quartile_3": high}


def forget_peak() -> None:
    """Count the peak memory of this process from here on."""
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5)


def peak_bytes() -> int:
    """Most memory since :func:`forget_peak`: of tensors on a GPU, else of the process."""
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


class DeviceTimer:
    """Milliseconds of what runs under it: of a GPU's queue, else of processor time.

    Neither waits, nor counts what others do on the machine.
    """

    def __enter__(self) -> "DeviceTimer":
        self._start = _mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = _mark()

    @property
    def milliseconds(self) -> float:
        """Of the latest run; waits for its end."""
        start, end = self._start, self._end
        if isinstance(start, float) or isinstance(end, float):
            return 1e3 * (end - start)
        end.synchronize()
        return start.elapsed_time(end)


def timed(step: Callable[[], Work]) -> Work:
    """What a step says, with its seconds."""
    synchronize(device())
    start, cpu = time.perf_counter(), time.process_time()
    work = step()
    synchronize(device())
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return replace(work, seconds=seconds, cpu_seconds=cpu_seconds)


def _mark() -> float | torch.cuda.Event:
    if device().type != "cuda":
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
