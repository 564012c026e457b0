"""What each process of a layout does: steps whose losses are compared, and steps that are timed."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.bundled import Bundled, make_engine
from benchmarks.common.shapes import Shape, micro_batches, mixed_rows
from benchmarks.common.teams import Member
from benchmarks.parts.tensor_memory import SEED, divided_among, held
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import data_rank, data_world_size, device, grid
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import apply_lora
from dschat_lora.lora.parallel import shard_of
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.perf.throughput import synchronize
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

ROWS_PER_STEP = 8  # in two micro-batches
# Of the default rate, at which the roundings of DP 2 alone grow to 3e-5 nats within 50 steps.
RATE_FACTOR = 0.2
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def losses(member: Member, *, dtype: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Losses of steps on the bundled model and data, and what its ranks exchanged meanwhile."""
    layout = member.layout
    bundled = Bundled(tiny=tiny, rows_per_step=ROWS_PER_STEP)
    with divided_among(layout.tensor_parallel, sequence_parallel=layout.sequence_parallel) as group:
        shares = data_world_size()
        model = bundled.build(dtype, group=group).model
        engine = make_engine(
            model,
            dtype=dtype,
            zero_stage=0,
            rows=ROWS_PER_STEP // 2 // shares,
            accumulation_steps=2,
        )
        windows = bundled.windows(steps, share=data_rank(), shares=shares)
        results = train_steps(engine, windows, SUPERVISED, repeat(RATE_FACTOR))
        found, alike, counts = [], True, Counter[str]()
        for _ in range(steps):
            with counted(counts):
                found.append(next(results).loss)
            alike = alike and replicas_alike(model, group)
        results.close()  # type: ignore[attr-defined]  # a generator
        engine._engine.destroy()
    per_step = {name: count / steps for name, count in counts.items()}
    return {"losses": found, "replicas_alike": alike, "collectives": per_step}


def replicas_alike(model: nn.Module, group: TensorGroup | None) -> bool:
    """Whether what every rank of the group holds and trains is the same bits on all of them."""
    if group is None:
        return True
    trained = (p for p in model.parameters() if p.requires_grad and shard_of(p) is None)
    copies = (group.gather(parameter.detach()) for parameter in trained)
    return all(torch.equal(each, ranks[0]) for ranks in copies for each in ranks)


@contextmanager
def counted(counts: "Counter[str]") -> Iterator[None]:
    """Within, add the collectives among the ranks of a model to ``counts``, by name."""
    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    ranks = grid()

    def counting(name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if ranks is not None and kwargs.get("group") is ranks.tensor_group:
                counts[name] += 1
            return originals[name](*args, **kwargs)

        return collective

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def memory(member: Member, *, path: str, shape: Shape, dtype: str) -> dict[str, int]:
    """See :func:`held`; of a step on one row of the shape."""
    return held(
        path,
        micro_batches(mixed_rows(shape)[:1], 1)[0],
        tensor_parallel=member.layout.tensor_parallel,
        lora_dim=shape.lora_dim,
        dtype=dtype,
    )


def prepare(member: Member, *, path: str, shape: Shape, dtype: str) -> None:
    """Make ready for :func:`step`, with two steps that do not count."""
    layout = member.layout
    divided = divided_among(layout.tensor_parallel, sequence_parallel=layout.sequence_parallel)
    group = divided.__enter__()  # as long as the process lives
    options = ModelConfig()
    model = load_causal_lm(
        path,
        load_config(path, options),
        options,
        dtype=DTYPES[dtype],
        meta=False,
        group=group,
    )
    apply_lora(model, LoraConfig(lora_dim=shape.lora_dim), seed=SEED)
    rows = mixed_rows(shape)[data_rank() :: data_world_size()]
    window = micro_batches(rows, shape.row_length * 2)
    engine = make_engine(model, dtype=dtype, zero_stage=0, rows=2, accumulation_steps=len(window))
    steps = train_steps(engine, repeat(window), SUPERVISED, repeat(1.0))
    member.kept = (divided, steps)
    for _ in range(2):
        next(steps)


def step(member: Member) -> dict[str, float]:
    """Seconds and processor seconds of a step, and the real tokens of all processes in it."""
    _, steps = member.kept
    synchronize(device())
    start, cpu = time.perf_counter(), time.process_time()
    result = next(steps)
    synchronize(device())
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "tokens": result.counts.num_tokens,
    }
