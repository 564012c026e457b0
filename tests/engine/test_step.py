"""A step at ZeRO 0 is queued whole before any number of it is read, and may be skipped whole."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_lora.config.stages import DpoConfig, RewardConfig
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.engine.build import TrainEngine, _buckets
from dschat_lora.engine.distributed import rank
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.runtime.setup import shard_model
from dschat_lora.supervised.objectives import SUPERVISED
from dschat_lora.supervised.pair_objectives import dpo_objective, reward_objective
from helpers.runs import engine_settings, release
from helpers.states import Toy, ToyModel, toy_groups, toy_loss
from helpers.steps import train_steps
from helpers.tiny import ragged_samples

pytestmark = pytest.mark.stage

# What makes the host wait for a device.
READS = {"aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.nonzero", "aten.equal"}


class Recording(TorchDispatchMode):
    """The names of the operations called in it, in turn; a mask as an index is a read too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function.overloadpacket)
        if name in ("aten.index", "aten.index_put_", "aten.index_put"):
            masks = any(index is not None and index.dtype == torch.bool for index in args[1])
            name = "aten.nonzero" if masks else name
        self.names.append(name)
        return function(*args, **(kwargs or {}))


def operations_of_steps(dtype, max_grad_norm, overflow):
    """Names of the operations of a step's backward and queue, and of reading its outcome."""
    model = Toy()
    settings = engine_settings(dtype=dtype, max_grad_norm=max_grad_norm)
    engine = TrainEngine(model, toy_groups(model), settings)
    engine.backward(toy_loss(engine, 0), last=True)
    engine.step()  # makes the moments
    loss = toy_loss(engine, 1) * (math.inf if overflow else 1.0)
    with Recording() as queued:
        engine.backward(loss, last=True)
        outcome = engine.queue_step()
    with Recording() as read:
        skipped = outcome().skipped
    release(engine)
    return {"queued": queued.names, "read": read.names, "skipped": skipped}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "overflow"])
@pytest.mark.parametrize(("dtype", "limit"), [("fp32", 0.0), ("fp32", 1.0), ("fp16", 1.0)])
def test_step_reads_one_number_and_that_after_all_else(ranks, size, dtype, limit, overflow):
    for report in ranks(size).run(
        "engine.test_step:operations_of_steps", dtype=dtype, max_grad_norm=limit, overflow=overflow
    ):
        assert "aten._fused_adamw_" in report["queued"]
        assert not READS & set(report["queued"])
        assert report["read"] == ["aten._local_scalar_dense"]
        assert report["skipped"] == overflow


def repeatable_passes(stages, timed):
    """Whether engines of these ZeRO stages repeat forward and backward passes."""
    repeated = []
    for stage in stages:
        model = Toy()
        json = {"wall_clock_breakdown": True} if timed else {}
        settings = engine_settings(stage=stage, deepspeed_json=json)
        shard_model(model, settings)
        engine = TrainEngine(model, toy_groups(model), settings)
        repeated.append((engine.repeats_forward, engine.repeats_backward))
        release(engine)
    return repeated


def test_passes_are_repeated_where_deepspeed_keeps_nothing_of_them(ranks):
    ask = partial(ranks(2).run, "engine.test_step:repeatable_passes")
    alone, in_buckets, shared = (True, True), (True, False), (False, False)
    expected = [alone, in_buckets, in_buckets, shared]
    assert ask(stages=[0, 1, 2, 3], timed=False) == [expected] * 2
    # A clock of DeepSpeed that runs refuses to be started.
    assert ask(stages=[0], timed=True) == [[shared]] * 2


def operations_of_a_whole_step(task, path):
    """Names of the operations of one turn of the training loop, counts to metrics."""
    from helpers import pair_runs, runs

    settings = engine_settings()
    if task == "sft":
        _, engine = runs.build(path, runs.LORA, settings)
        batches = [SampleCollator(0)([[each] for each in ragged_samples(3)]) for _ in "ab"]
        objective = SUPERVISED
    else:
        _, engine = pair_runs.build_pair_engine(path, task, runs.LORA, settings)
        pairs = pair_runs.ragged_pairs(4)
        batches = [PairCollator(0, "shared")([[pair] for pair in pairs])]
        reference = partial(torch.zeros, 8)
        objective = {
            "reward": reward_objective(RewardConfig()),
            "dpo": dpo_objective(DpoConfig(), lambda batch: reference()),
        }[task]
    steps = train_steps(engine, [batches, batches], objective, [1.0, 1.0])
    next(steps)
    with Recording() as step:
        next(steps)
    release(engine)
    return step.names


@pytest.mark.parametrize("task", ["sft", "reward", "dpo"])
def test_turn_of_the_loop_reads_nothing_before_its_update_is_queued(ranks, model_directory, task):
    (names,) = ranks(1).run(
        "engine.test_step:operations_of_a_whole_step", task=task, path=model_directory("opt")
    )
    update = len(names) - 1 - names[::-1].index("aten._fused_adamw_")
    assert len(names[:update]) > 200  # forward and backward are in it
    assert not READS & set(names[:update])


def skipped_step(stage):
    """Everything AdamW holds before and after a step that is skipped."""
    holder = ToyModel(stage=stage)
    holder.train(0, 2)
    held = [[p.detach().clone() for p in holder.model.parameters()] + _state(holder)]
    ((_, norm, _),) = holder.train(2, 1, overflow_at=(2,))
    held.append([p.detach().clone() for p in holder.model.parameters()] + _state(holder))
    cleared = all(p.grad is None for p in holder.model.parameters())
    release(holder.engine)
    return {"held": held, "norm": norm, "cleared": cleared}


def _state(holder):
    states = holder.engine.adam.state.values()
    return [tensor.clone() for state in states for tensor in state.values()]


@pytest.mark.parametrize("size", [1, 2])
def test_skipped_step_changes_no_weight_no_moment_and_no_count(ranks, size):
    for report in ranks(size).run("engine.test_step:skipped_step", stage=0):
        before, after = report["held"]
        assert len(before) == 4 * (1 + 3)
        for old, new in zip(before, after, strict=True):
            assert torch.equal(old, new)
        assert report["norm"] == math.inf
        assert report["cleared"]


def moments(dtype):
    """AdamW's tensors after two steps, of which every gradient is clipped."""
    model = Toy()
    settings = engine_settings(dtype=dtype, max_grad_norm=0.1)
    engine = TrainEngine(model, toy_groups(model), settings)
    for step in range(2):
        engine.backward(toy_loss(engine, step), last=True)
        engine.step()
    state = [t.clone() for state in engine.adam.state.values() for t in state.values()]
    release(engine)
    return state


def test_loss_scale_leaves_the_moments_alone(ranks):
    # A power of two scales without rounding.
    ((plain,), (scaled,)) = (
        ranks(1).run("engine.test_step:moments", dtype=d) for d in ("fp32", "fp16")
    )
    for expected, ours in zip(plain, scaled, strict=True):
        torch.testing.assert_close(ours, expected)


class Partly(nn.Module):
    """Three numbers, of which a loss needs one."""

    def __init__(self):
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.full((1,), 2.0)) for _ in range(3))

    def forward(self, index):
        return self.numbers[index].sum()


def one_step_of_each(runs):
    """The weights after a step whose rate is 1/10 and weight decay 1/2.

    Args:
        runs: (ZeRO stage, index of the number that each rank's loss needs).
    """
    return [_one_step(stage, indices[rank()]) for stage, indices in runs]


def _one_step(stage, index):
    model, settings = Partly(), engine_settings(stage=stage)
    shard_model(model, settings)
    groups = [{"params": [*model.numbers], "lr": 0.1, "weight_decay": 0.5, "name": "all"}]
    engine = TrainEngine(model, groups, settings)
    engine.backward(engine(index), last=True)
    engine.step()
    weights = gather_to_cpu(dict(model.named_parameters()))
    release(engine)
    return [float(value) for value in weights.values()]


# The first step of AdamW goes one rate down whatever the gradient, after 2 * (1 - 0.05).
USED, UNUSED = pytest.approx(1.8, abs=1e-5), pytest.approx(1.9, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_unused_parameters_decay_alike_at_every_stage(ranks, size):
    runs = [(stage, [1, 1]) for stage in range(4)]
    for weights in ranks(size).run("engine.test_step:one_step_of_each", runs=runs)[0]:
        assert weights == [UNUSED, USED, UNUSED]


def test_gradient_of_one_rank_alone_counts(ranks):
    (weights,) = ranks(2).run("engine.test_step:one_step_of_each", runs=[(0, [0, 2])])[0]
    assert weights == [USED, UNUSED, USED]


def sums_in_pieces(limits):
    """Gradients of one step with buckets of so many elements."""
    from dschat_lora.engine import build

    weights, usual = [], build.BUCKET_SIZE
    for build.BUCKET_SIZE in limits:
        holder = ToyModel(stage=0)
        holder.train(0, 1)
        weights.append([p.detach().clone() for p in holder.model.parameters()])
        release(holder.engine)
    build.BUCKET_SIZE = usual
    return weights


def test_gradients_are_the_same_in_buckets_of_any_size(ranks):
    whole, *parts = ranks(2).run("engine.test_step:sums_in_pieces", limits=[10**8, 36, 1])[0]
    for part in parts:
        for tensor, expected in zip(part, whole, strict=True):
            assert torch.equal(tensor, expected)


def test_buckets_keep_the_order_and_their_limit():
    parameters = [nn.Parameter(torch.zeros(count)) for count in (3, 2, 4, 1, 7)]
    sizes = [[p.numel() for p in bucket] for bucket in _buckets(parameters, 5)]
    assert sizes == [[3, 2], [4, 1], [7]]


@pytest.mark.parametrize("stage", [1, 2])
def test_one_process_runs_as_stage_0_where_nothing_can_be_sharded(ranks, stage):
    assert ranks(1).run("engine.test_step:stages_in_use", stage=stage) == [[0, stage, stage]]
    assert ranks(2).run("engine.test_step:stages_in_use", stage=stage) == [[stage] * 3] * 2


def stages_in_use(stage):
    """With fp32 weights, offloaded ones, and 16-bit ones."""
    settings, offloading = engine_settings(stage=stage), engine_settings(stage=stage, offload=True)
    return [
        settings.stage_in_use(None),
        offloading.stage_in_use(None),
        settings.stage_in_use("bf16"),
    ]
