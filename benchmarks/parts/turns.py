"""Contenders in processes of their own that take turns: how they start, answer and are compared."""

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from dschat_lora.engine.distributed import device

ANSWER_SECONDS = 600.0  # for a contender to be ready, or to take a turn


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


def stop(runners: Sequence[Runner]) -> None:
    """Leave no process behind."""
    for runner in runners:
        if runner.process is not None:
            runner.process.kill()
            runner.process.join()


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else values * 3
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
