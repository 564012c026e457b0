"""Processes that train one model together in some layout, each asked for the same at a time."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.turns import start, stop
from dschat_lora.engine.distributed import device
from dschat_lora.engine.process_group import init_distributed, shutdown


@dataclass(frozen=True)
class Layout:
    """How processes share a model and the data; what is not tensor-parallel is data-parallel."""

    name: str
    processes: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False


@dataclass
class Member:
    """One of the processes; functions that it is asked to run keep things here."""

    layout: Layout
    kept: Any = None


class Team:
    """The processes of a layout, which have met."""

    def __init__(self, context: Any, layout: Layout) -> None:
        port = _free_port()
        self._runners = [
            start(context, f"{layout.name}, rank {rank}", _serve, (layout, rank, port))
            for rank in range(layout.processes)
        ]
        self._answers()

    def ask(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What ``function(member, **arguments)`` returns on each rank.

        Raises:
            RuntimeError: if it failed on any.
        """
        for runner in self._runners:
            runner.connection.send((function, arguments))
        return self._answers()

    def end(self) -> None:
        """Leave no process behind."""
        stop(self._runners)

    def _answers(self) -> list[Any]:
        answers = [runner.receive() for runner in self._runners]
        for runner in self._runners:
            if runner.problem is not None:
                self.end()
                raise RuntimeError(f"{runner.name}: {runner.problem}")
        return [answer["value"] for answer in answers]


def _serve(connection: Any, name: str, task: tuple[Layout, int, int]) -> None:
    layout, rank, port = task
    places = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    sizes = {"WORLD_SIZE": layout.processes, "LOCAL_WORLD_SIZE": layout.processes}
    os.environ.update({key: str(value) for key, value in (places | sizes).items()})
    try:
        init_distributed()
        if device().type == "cpu":
            torch.set_num_threads(1)
        member = Member(layout)
        connection.send({"value": None})
        while True:
            function, arguments = connection.recv()
            connection.send({"value": function(member, **arguments)})
    except (EOFError, BrokenPipeError):  # nobody asks any more
        shutdown()
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}"[:500])
        raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
