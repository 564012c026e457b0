"""What the engine adds to a step of many small adapters, beside torch's own AdamW."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.turns import spread
from dschat_lora.config.groups import OptimConfig
from dschat_lora.engine.build import EngineSettings, TrainEngine
from dschat_lora.engine.distributed import device
from dschat_lora.perf.throughput import synchronize
from dschat_lora.runtime.setup import shard_model

PLAIN = "plain torch"
STAGES = (0, 1, 2, 3)
RATE = 1e-4


@dataclass(frozen=True)
class AdapterSize:
    """Adapters of square layers, and how often a step is timed."""

    layers: int  # two tensors each
    width: int
    rank: int
    rounds: int


FULL = AdapterSize(layers=224, width=1024, rank=16, rounds=40)
TINY = AdapterSize(layers=8, width=64, rank=4, rounds=3)


class Adapters(nn.Module):
    """Factors alone, of which the forward wants half the sum of squares."""

    def __init__(self, size: AdapterSize) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(size.rank, size.width), (size.width, size.rank)] * size.layers
        self.factors = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)

    def forward(self) -> Tensor:
        """Scalar loss."""
        loss: Tensor = _HalfSquares.apply(*self.factors)  # type: ignore[no-untyped-call]
        return loss


class _HalfSquares(torch.autograd.Function):
    """``sum |p|^2 / 2`` in a few kernels, so that what is timed is not the model."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return torch.stack(torch._foreach_norm(tensors)).square().sum() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch._foreach_mul(ctx.saved_tensors, grad))


def run(report: PartReport, *, tiny: bool) -> None:
    """Time steps of torch and of engines at each ZeRO stage, in turns."""
    size = TINY if tiny else FULL
    times = measure(size)
    base = median(times[PLAIN])
    rows = [
        {"step": name, **spread(values), "over_plain": median(values) - base}
        for name, values in times.items()
    ]
    report.store({"tensors": 2 * size.layers, "unit": "ms", "steps": rows})
    header = list(rows[0])
    print_table(header, [[row[key] for key in header] for row in rows])
    report.check("every contender stepped", all(base > 0 for base in map(median, times.values())))


def measure(size: AdapterSize, stages: tuple[int, ...] = STAGES) -> dict[str, list[float]]:
    """Milliseconds of each step of each contender; call on every rank."""
    steps = {PLAIN: plain_step(size)} | {f"ZeRO {s}": engine_step(size, s) for s in stages}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(2 + size.rounds):
        for name, step in steps.items():
            synchronize(device())
            start = time.perf_counter()
            step()
            synchronize(device())
            if number >= 2:  # the first make the optimizer's state
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def plain_step(size: AdapterSize) -> Callable[[], None]:
    """Forward, backward, clipping and update in torch alone, on one process."""
    model = Adapters(size).to(device())
    parameters = list(model.parameters())
    optim = OptimConfig()
    adam = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, fused=True)

    def step() -> None:
        model().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, optim.max_grad_norm, foreach=True)
        adam.step()
        adam.zero_grad()

    return step


def engine_step(size: AdapterSize, zero_stage: int) -> Callable[[], None]:
    """The same through a :class:`TrainEngine`."""
    optim = OptimConfig()
    settings = EngineSettings(
        dtype="fp32",
        zero_stage=zero_stage,
        offload=False,
        micro_batch_size=1,
        accumulation_steps=1,
        max_grad_norm=optim.max_grad_norm,
        betas=(optim.adam_beta1, optim.adam_beta2),
        epsilon=optim.adam_epsilon,
        deepspeed_json={},
    )
    model = Adapters(size)
    shard_model(model, settings)
    groups = [{"params": list(model.parameters()), "lr": RATE, "weight_decay": 0.0, "name": "lora"}]
    engine = TrainEngine(model, groups, settings)

    def step() -> None:
        engine.set_rates(1.0)
        engine.backward(engine(), last=True)
        engine.step()

    return step
