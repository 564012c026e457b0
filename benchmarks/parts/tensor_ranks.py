"""Processes that train one model together in some layout, each asked for the same at a time."""

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.bundled import Bundled, make_engine
from benchmarks.common.shapes import Shape, micro_batches, mixed_rows
from benchmarks.common.turns import Context, Work, start, stop, timed
from benchmarks.parts.tensor_memory import SEED, divided_among, held, read
from dschat_lora.config.groups import LoraConfig
from dschat_lora.engine.distributed import data_rank, data_world_size, grid
from dschat_lora.engine.process_group import init_distributed
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import apply_lora
from dschat_lora.lora.parallel import shard_of
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

ROWS_PER_STEP = 8  # in two micro-batches
# Of the default rate, at which the roundings of DP 2 alone grow to 3e-5 nats within 50 steps.
RATE_FACTOR = 0.2
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Layout:
    """How processes share a model and the data; what is not tensor-parallel is data-parallel."""

    name: str
    processes: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    threads: int = 1  # of a CPU, each


class Team:
    """The processes of a layout, which have met."""

    def __init__(self, context: Context, layout: Layout) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._runners = [
            start(context, f"{layout.name}, rank {rank}", partial(Member, rank, port), layout)
            for rank in range(layout.processes)
        ]
        self._answers()

    def ask(self, method: str, *arguments: object) -> list[Any]:
        """What a method of :class:`Member` returns on each rank.

        Raises:
            RuntimeError: if it failed on any.
        """
        for runner in self._runners:
            runner.connection.send((method, *arguments))
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
        return answers


class Member:
    """One of the processes: steps whose losses are compared, and steps that are timed."""

    ready = True

    def __init__(self, rank: int, port: int, layout: Layout) -> None:
        places = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        sizes = {"WORLD_SIZE": layout.processes, "LOCAL_WORLD_SIZE": layout.processes}
        os.environ.update({key: str(value) for key, value in (places | sizes).items()})
        init_distributed()
        self._layout = layout
        self._divided = partial(
            divided_among, layout.tensor_parallel, sequence_parallel=layout.sequence_parallel
        )

    def losses(self, dtype: str, steps: int, tiny: bool) -> dict[str, Any]:
        """Losses of steps on the bundled model and data, and collectives of its ranks in each."""
        bundled = Bundled(tiny=tiny, rows_per_step=ROWS_PER_STEP)
        with self._divided() as group:
            shares = data_world_size()
            model = bundled.build(dtype, group=group).model
            rows = ROWS_PER_STEP // 2 // shares
            engine = make_engine(model, dtype=dtype, zero_stage=0, rows=rows, accumulation_steps=2)
            windows = bundled.windows(steps, share=data_rank(), shares=shares)
            results = train_steps(engine, windows, SUPERVISED, repeat(RATE_FACTOR))
            losses, alike, collectives = [], True, 0
            for _ in range(steps):
                with ExitStack() as stack:
                    spies = [
                        stack.enter_context(
                            mock.patch.object(dist, name, wraps=getattr(dist, name))
                        )
                        for name in COLLECTIVES
                    ]
                    losses.append(next(results).loss)
                calls = [call.kwargs.get("group") for spy in spies for call in spy.call_args_list]
                if (ranks := grid()) is not None:
                    collectives += sum(each is ranks.tensor_group for each in calls)
                alike = alike and replicas_alike(model, group)
            results.close()  # type: ignore[attr-defined]  # a generator
            engine._engine.destroy()
        return {"losses": losses, "replicas_alike": alike, "collectives": collectives / steps}

    def memory(self, path: str, shape: Shape, dtype: str) -> dict[str, int]:
        """See :func:`held`; of a step on one row of the shape."""
        return held(
            path,
            micro_batches(mixed_rows(shape)[:1], 1)[0],
            tensor_parallel=self._layout.tensor_parallel,
            lora_dim=shape.lora_dim,
            dtype=dtype,
        )

    def prepare(self, path: str, shape: Shape, dtype: str) -> None:
        """Make ready for :meth:`step`, with two steps that do not count."""
        self._entered = self._divided()  # as long as the process lives
        model, _ = read(path, self._entered.__enter__(), dtype=dtype)
        apply_lora(model, LoraConfig(lora_dim=shape.lora_dim), seed=SEED)
        rows = mixed_rows(shape)[data_rank() :: data_world_size()]
        window = micro_batches(rows, shape.row_length * 2)
        engine = make_engine(
            model, dtype=dtype, zero_stage=0, rows=2, accumulation_steps=len(window)
        )
        self._steps = train_steps(engine, repeat(window), SUPERVISED, repeat(1.0))
        for _ in range(2):
            next(self._steps)

    def step(self) -> Work:
        """A step, and the real tokens of all processes in it."""
        return timed(lambda: Work(next(self._steps).counts.num_tokens))


def replicas_alike(model: nn.Module, group: TensorGroup | None) -> bool:
    """Whether what every rank of the group holds and trains is the same bits on all of them."""
    if group is None:
        return True
    trained = (p for p in model.parameters() if p.requires_grad and shard_of(p) is None)
    copies = (group.gather(parameter.detach()) for parameter in trained)
    return all(torch.equal(each, ranks[0]) for ranks in copies for each in ranks)
