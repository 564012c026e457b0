"""Contenders in processes of their own that take turns: how they start, answer and are compared."""

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from dschat_lora.engine.distributed import device

ANSWER_SECONDS = 600.0  # for a contender to be ready, or to take a turn
NOT_INSTALLED = "TRL or PEFT is not installed"


@dataclass
class Runner:
    """A contender's process, and what its turns took."""

    name: str
    process: Any
    connection: Any
    ready: Any = None
    problem: str | None = None
    works: list[Any] = field(default_factory=list)
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

    def ask(self, message: Any) -> Any:
        """Its answer to a message."""
        self.connection.send(message)
        return self.receive()


def make_context(preload: Sequence[str]) -> Any:
    """How processes start: on a CPU all with the same modules imported."""
    # A process that has looked for a GPU must not fork.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(preload))
    return context


def start(context: Any, name: str, serve: Callable[..., None], task: Any) -> Runner:
    """A process that runs ``serve(connection, name, task)``."""
    mine, its = context.Pipe()
    process = context.Process(target=serve, args=(its, name, task), daemon=True)
    process.start()
    its.close()
    return Runner(name, process, mine)


def start_all(
    contenders: Iterable[str], serve: Callable[..., None], task: Any, *, optional: Sequence[str]
) -> list[Runner]:
    """A process for each contender; those of TRL only where it and PEFT are installed.

    Args:
        contenders: their names.
        serve: run in each; see :func:`start`.
        task: of all of them.
        optional: modules that TRL's contenders import, so that their memory is a library's.
    """
    installed = has_trl()
    context = make_context([serve.__module__, *(optional if installed else ())])
    return [
        start(context, name, serve, task)
        if installed or not name.startswith("TRL")
        else Runner(name, None, None, problem=NOT_INSTALLED)
        for name in contenders
    ]


def all_run(runners: Iterable[Runner]) -> bool:
    """Whether every contender worked that could be started."""
    return all(runner.problem in (None, NOT_INSTALLED) for runner in runners)


def has_trl() -> bool:
    """Whether TRL and PEFT are installed."""
    return all(find_spec(name) for name in ("trl", "peft", "datasets"))


def stop(runners: Sequence[Runner]) -> None:
    """Leave no process behind."""
    for runner in runners:
        if runner.process is not None:
            runner.process.kill()
            runner.process.join()


def take_turns(
    runners: Sequence[Runner], *, rounds: int, seconds: float = math.inf, deadline: float = math.inf
) -> None:
    """A step of each in every round; there is one round at least.

    Args:
        runners: as :func:`start` gave them.
        rounds: at most.
        seconds: no round begins later than so much after the first one.
        deadline: of ``time.monotonic()``: no round begins that would end later, if it took as
            long as the longest one so far.
    """
    for runner in runners:
        if runner.process is not None:
            runner.ready = runner.receive()
    first, longest = time.monotonic(), 0.0
    for number in range(rounds):
        begun = time.monotonic()
        if number and (begun > first + seconds or begun + longest > deadline):
            break
        for runner in runners:
            if runner.problem is None:
                work = runner.ask("step")
                runner.works += [work] if work is not None else []
        longest = max(longest, time.monotonic() - begun)
    for runner in runners:
        if runner.problem is None:
            runner.peak_bytes = runner.ask("stop")


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
        if isinstance(self._start, float):
            return 1e3 * (self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


def _mark() -> Any:
    if device().type != "cuda":
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
