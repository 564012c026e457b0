"""What an engine has learnt, carried from one engine to the next, in the processes of ``Ranks``."""

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dschat_lora.checkpoint.tensors import TensorFiles
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.engine.state import EngineState
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.runtime.checkpointer import Saver
from dschat_lora.runtime.setup import shard_model
from dschat_lora.supervised.objectives import SUPERVISED
from helpers.runs import LORA, build, engine_settings, loader, overflowing_at, release
from helpers.steps import train_steps
from helpers.tiny import ragged_samples

ROWS = 4  # of a step, over all ranks


class TinyModel:
    """A tiny language model on an engine; its steps are those of one fixed run."""

    def __init__(self, path, *, stage, dtype="fp32", lora=LORA, deepspeed_json=None):
        settings = engine_settings(
            dtype=dtype, stage=stage, micro=ROWS // world_size(), deepspeed_json=deepspeed_json
        )
        self.model, self.engine = build(path, lora, settings)
        self.state = EngineState(self.engine, self.model)

    def train(self, first, count, overflow_at=()):
        """(loss, gradient norm, loss scale) of so many steps from ``first`` on."""
        source = loader(ragged_samples(64), micro=ROWS // world_size(), accumulation=1)
        outcomes = []
        for step in range(first, first + count):
            windows = [next(source.epoch(0, step))]
            loss = overflowing_at(0, 1) if step in overflow_at else SUPERVISED
            (done,) = train_steps(self.engine, windows, loss, [1.0 - step / 30])
            outcomes.append((done.loss, done.outcome.grad_norm, done.outcome.loss_scale))
        return outcomes


class Toy(nn.Module):
    """Odd sizes, which no number of processes divides, and a tensor of one number."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"inner": (5, 7), "outer": (3, 5), "bias": (3,), "gain": (1,)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x):
        return torch.tanh(x @ self.inner.T) @ self.outer.T * self.gain + self.bias


def toy_loss(model, step, shard=slice(None)):
    """Summed over the shard of the step's six rows."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 7, generator=generator), torch.randn(6, 3, generator=generator)
    return (model(x[shard]) - y[shard]).square().sum()


def toy_groups(model):
    """Two groups of parameters, that of the matrices at another rate."""
    return [
        {"params": [model.inner, model.outer], "lr": 1e-2, "weight_decay": 0.1, "name": "base"},
        {"params": [model.bias, model.gain], "lr": 3e-2, "weight_decay": 0.0, "name": "small"},
    ]


class ToyModel:
    """:class:`Toy` on an engine."""

    def __init__(self, *, stage, offload=False, zero=None):
        section = {"stage3_param_persistence_threshold": 0, **(zero or {})}
        settings = engine_settings(
            stage=stage, offload=offload, deepspeed_json={"zero_optimization": section}
        )
        self.model = Toy()
        shard_model(self.model, settings)
        self.engine = TrainEngine(self.model, toy_groups(self.model), settings)
        self.state = EngineState(self.engine, self.model)

    def train(self, first, count, overflow_at=()):
        """(loss of this rank, gradient norm, loss scale) of so many steps from ``first`` on."""
        outcomes = []
        for step in range(first, first + count):
            loss = toy_loss(self.engine, step, slice(rank(), None, world_size()))
            self.engine.backward(loss * (math.inf if step in overflow_at else 1 / 6), last=True)
            outcome = self.engine.step()
            outcomes.append((float(loss.detach()), outcome.grad_norm, outcome.loss_scale))
        return outcomes


def carry(
    holders,
    *,
    path=None,
    steps=3,
    further=3,
    overflow_at=(),
    planted=False,
    read_from=None,
    write_to=None,
    common=None,
):
    """Train with the first holder, and hand what it learnt on to each of the others.

    Args:
        holders: arguments of :class:`TinyModel` or, without a path, of :class:`ToyModel`.
        path: of the tiny model.
        steps: before the first hand-over.
        further: that each then goes on for.
        overflow_at: steps of these whose gradient is not finite.
        planted: put negative zeros and the smallest numbers into every tensor first.
        read_from: directory of a checkpoint to begin with, rather than train.
        write_to: directory that receives what was handed on last, as a checkpoint.
        common: further arguments of every holder.

    Returns:
        For each holder the state it holds after taking it over, the model's own tensors, and
        the outcomes and the state of the further steps.
    """
    reports, held = [], None
    for arguments in holders:
        arguments = {**(common or {}), **arguments}
        holder = TinyModel(path, **arguments) if path else ToyModel(**arguments)
        first = not reports
        if first and read_from:
            held = from_checkpoint(Path(read_from))
        elif first:
            before = holder.train(0, steps, overflow_at)
            held = snapshot(holder) if planted else None
            for tensor in held["tensors"].values() if planted and rank() == 0 else ():
                tensor.flatten()[:2] = torch.tensor([-0.0, 1e-42])[: tensor.numel()]
        if held is not None:
            facts = _shared(held["facts"])
            holder.state.load(facts, lambda key: held["tensors"][key])  # noqa: B023
        held = snapshot(holder)
        report = {
            **held,
            "before": before if first and not read_from else [],
            "model": gather_to_cpu(dict(holder.model.named_parameters())),
            "further": holder.train(steps, further),
            "later": snapshot(holder),
        }
        reports.append(report)
        release(holder.engine)
    if write_to:
        to_checkpoint(Path(write_to), held)
    return reports


def snapshot(holder):
    """What an engine has learnt; the tensors on rank 0 alone."""
    return {"facts": holder.state.facts(), "tensors": dict(holder.state.tensors())}


def to_checkpoint(run, held):
    """Write a snapshot as a run's checkpoint of step 1."""
    if rank() == 0:
        saver = Saver(run, keep=0, before_commit=lambda: None)
        saver.save(1, {"model": iter(held["tensors"].items())}, {"facts": held["facts"]})
        saver.wait()
    dist.barrier()


def from_checkpoint(run):
    """The snapshot that :func:`to_checkpoint` wrote."""
    if rank() != 0:
        return {"facts": None, "tensors": None}
    (directory,) = (run / "checkpoints").iterdir()
    files = TensorFiles(sorted(directory.glob("model-*.safetensors")))
    keys = list(files._owner)
    facts = json.loads((directory / "state.json").read_text(encoding="utf-8"))["facts"]
    return {"facts": facts, "tensors": {key: files.read(key) for key in keys}}


def _shared(facts):
    box = [facts]
    dist.broadcast_object_list(box, 0)
    return box[0]
