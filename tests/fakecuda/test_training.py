"""Optimizer steps on a fake GPU: waits, types, operations, and memory against the estimate."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.common import shapes
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.perf.launches import count_launches
from helpers.spread import ALL

pytestmark = pytest.mark.stage

GIB = 2**30
LAYERS = None if ALL else 4  # all blocks, or enough of them


def waits_of(found):
    """{function: what it waits for}, by the name of the function."""
    return {place.split()[-1]: place.split("  ")[0] for place in found["waits"]}


def train(fake_device, shape, **options):
    return fake_device.run("fakecuda.programs:train", shape=shape, **options)


def random_shape(name, *, layers):
    """The model with adapters, on the meta device."""
    shape = replace(shapes.SHAPES[name], num_layers=layers)
    model = shapes.meta_base(shape, dtype=torch.bfloat16)
    apply_lora(model, LoraConfig(lora_dim=16), seed=0)
    return model


def check_estimate(found):
    ratio = found["estimated"] / found["peak"]
    lines = [f"{size / GIB:.3f} GiB {label}" for size, label in found["alive_at_peak"]]
    assert 0.9 < ratio < 1.1, f"estimated {found['estimate']}, alive at the peak:\n{lines}"


@pytest.mark.parametrize(
    ("card", "dtype", "kernel"),
    [("h200", "bfloat16", "_varlen_attn"), *[("t4", "float16", "_efficient_attention")] * ALL],
)
def test_a_step_reads_its_loss_and_norm_and_waits_for_nothing_else(
    fake_device, card, dtype, kernel
):
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    noted = train(
        fake_device,
        "opt-1.3b",
        layers=LAYERS,
        card=card,
        dtype=short,
        packed=True,
        rows=4,
        length=1024,
    )
    assert waits_of(noted) == {"read": "event"}
    assert [*noted["waits"].values()] == [2]
    assert {each.split()[1] for each in noted["products"]} == {dtype}
    assert any(kernel in name for name in noted["operations"])
    if card == "h200":
        check_estimate(noted)


def train_on(fake_device, **options):
    return fake_device.run("fakecuda.programs:train_on", shape="opt-1.3b", layers=1, **options)


@pytest.mark.parametrize(
    ("options", "a_step"),
    [
        ({}, {}),
        *[({"save_interval": 1}, {"event": 2})] * ALL,
        # An overflow decides the scale of the next step's losses.
        *[({"dtype": "fp16", "card": "t4"}, {"event": 1})] * ALL,
        # DeepSpeed reads the norm, and moves a number to the device.
        *[({"zero_stage": 2, "world_size": 2}, {"item": 1, "copy cpu->cuda": 1})] * ALL,
    ],
)
def test_a_run_waits_for_no_step_that_nothing_follows(fake_device, options, a_step):
    """Its results are read when the device has the next one: norm, and sums of the loss."""
    few, more = (train_on(fake_device, steps=steps, **options) for steps in (3, 5))
    assert more["steps"] == [1, 2, 3, 4, 5]
    grown = Counter()
    for place, times in more["waits"].items():
        grown[place.split("  ")[0]] += times - few["waits"].get(place, 0)
    assert {what: times / 2 for what, times in grown.items() if times} == a_step
    late = sum(more["late_reads"].values()) - sum(few["late_reads"].values())
    assert late == 2 * (2 - a_step.get("event", 0) - a_step.get("item", 0))


# Numbers of a token: heads' and keys' features, and whether norms of both read them.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "hidden", "queries", "keys", "ffn", "norms"),
    [("llama-3-8b", 4096, 4096, 1024, 14336, 0), *[("qwen3-4b", 2560, 4096, 1024, 9728, 1)] * ALL],
)
def test_a_block_keeps_each_tensor_once_and_launches_few_kernels(
    fake_device, shape, hidden, queries, keys, ffn, norms
):
    two, four = (train(fake_device, shape, layers=n, rows=4) for n in (2, 4))
    kept = (four["peak"] - four["resident"] - two["peak"] + two["resident"]) / 2
    # Factors in 16 bits, as long as a step takes.
    kept -= 2 * 16 * (7 * hidden + 2 * queries + 2 * keys + 3 * ffn)
    numbers = 4 * hidden + (2 + norms) * queries + (2 + norms) * keys + 2 * ffn + 7 * 16
    sums = 4 * (32 + 2 + norms * (32 + 8))  # in fp32: attention's by head, norms' by row
    assert kept / (4 * 512) == pytest.approx(2 * numbers + sums, rel=1e-3)
    block = (four["launches"] - two["launches"]) / 2
    rule = [count_launches(random_shape(shape, layers=n)).training for n in (1, 2)]
    assert block == rule[1] - rule[0]


# The first table of benchmarks/speed.md about estimated memory, and what it says of eight GPUs.
ROWS = [
    (shape, rank, recompute)
    for shape in ("opt-1.3b", "opt-6.7b", "llama-2-7b")
    for rank in (16, 128)
    for recompute in (False, True)
]


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "rank", "recompute"), ROWS if ALL else ROWS[:1])
def test_memory_is_what_the_document_says(fake_device, shape, rank, recompute):
    check_estimate(train(fake_device, shape, layers=LAYERS, lora_dim=rank, recompute=recompute))


LONG = {"rows": 1, "length": 16384, "sample": 16384, "recompute": True}
MORE = [
    ("llama-3-8b", LONG),
    ("llama-3-8b", {**LONG, "dtype": "fp32"}),  # under a mask
    ("llama-3-8b", {"rows": 4, "base_bits": 4}),
    ("llama-3-8b", {"rows": 4}),
    ("opt-6.7b", {"base_bits": 4, "recompute": True}),
    ("qwen3-4b", {"rows": 4}),
    ("opt-1.3b", {"lora_dim": 0, "rows": 4}),
]
SHARDED = [
    ("opt-1.3b", {"zero_stage": 2, "rows": 4}),
    ("opt-1.3b", {"zero_stage": 3, "rows": 4}),
    *(("opt-1.3b", {"zero_stage": n, "rows": 4, "lora_dim": 0}) for n in range(4)),
    ("opt-1.3b", {"zero_stage": 1, "rows": 4, "lora_dim": 0, "accumulation": 2}),
    ("opt-6.7b", {"zero_stage": 3, "rows": 4, "recompute": True}),
    ("llama-2-7b", {"zero_stage": 3, "rows": 4}),
    ("llama-3-8b", {"zero_stage": 3, "rows": 4, "recompute": True}),
    ("qwen3-4b", {"zero_stage": 3, "rows": 4}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "options"), MORE if ALL else MORE[:1])
def test_memory_of_other_shapes(fake_device, shape, options):
    check_estimate(train(fake_device, shape, layers=LAYERS, **options))


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "options"), SHARDED if ALL else SHARDED[1:2])
def test_memory_of_one_of_eight_processes(fake_device, shape, options):
    noted = train(fake_device, shape, world_size=8, layers=LAYERS, **options)
    check_estimate(noted)
    # DeepSpeed's step and its norm, of groups with and without weight decay, and the loss.
    assert sum(noted["waits"].values()) <= (8 if options.get("lora_dim") == 0 else 5)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [2, 3] if ALL else [3])
def test_offload_copies_gradients_and_updates_and_at_zero_3_weights(fake_device, stage):
    noted = train(fake_device, "opt-1.3b", layers=4, rows=4, zero_stage=stage, offload=True)
    check_estimate(noted)
    trained = noted["estimate"]["gradients"]
    assert trained <= noted["copied"]["cuda->cpu"] < 3 * trained
    assert noted["copied"]["cpu->cuda"] >= (trained if stage == 2 else 2 * 4 * 12 * 2048**2)
    # Those of DeepSpeed's step, which at stages 1 and 2 reads each tensor's norm, and the loss.
    assert {place.split()[-1] for place in noted["waits"]} <= {"queue_step", "backward", "read"}


@pytest.mark.thorough
def test_block_inputs_on_the_host_leave_two_on_the_device_and_no_wait(fake_device):
    """OPT-1.3B, 6 blocks, 4 x 512 positions: an input of 2,048 numbers takes 8 MiB in bf16."""
    options = {"layers": 6, "rows": 4, "recompute": True}
    kept = train(fake_device, "opt-1.3b", **options)
    moved = train(fake_device, "opt-1.3b", offload_activations=True, **options)
    check_estimate(moved)
    each = 4 * 512 * 2048 * 2
    assert kept["peak"] - moved["peak"] == pytest.approx((6 - 2) * each, abs=each / 2)
    # The last two are still there when the backward pass begins.
    assert moved["copied"]["cuda->cpu"] - kept["copied"].get("cuda->cpu", 0) == 6 * each
    assert moved["copied"]["cpu->cuda"] - kept["copied"].get("cpu->cuda", 0) == (6 - 2) * each
    assert waits_of(moved) == {"read": "event"}


@pytest.mark.thorough
def test_compiled_blocks_run_on_the_device_and_wait_for_nothing(fake_device):
    noted = train(fake_device, "opt-1.3b", layers=2, rows=4, compiled=True)
    assert waits_of(noted) == {"read": "event"}
    assert {each.split()[1] for each in noted["products"]} == {"bfloat16"}
    check_estimate(noted)


@pytest.mark.thorough
def test_flex_attention_makes_its_mask_on_the_device_and_waits_for_nothing(fake_device):
    noted = train(fake_device, "opt-1.3b", layers=2, rows=4, attention="flex_attention")
    assert waits_of(noted) == {"read": "event"}
    assert noted["operations"]["flex_attention"] == 2
    check_estimate(noted)


LAUNCHED = 90  # with graphs, a micro-batch: inputs, head, loss and its share of the optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "llama-3-8b"},
        *[{"shape": "opt-1.3b", "recompute": True}, {"shape": "llama-3-8b", "base_bits": 4}] * ALL,
        *[{"shape": "opt-1.3b", "packed": True}, {"shape": "opt-1.3b", "layers": 4}] * ALL,
        *[{"shape": "qwen3-30b-a3b"}] * ALL,
    ],
)
def test_passes_of_a_shape_are_captured_once_and_replayed_from_then_on(fake_device, options):
    options = {"layers": 2, "rows": 4, "steps": 3} | options
    noted = train(fake_device, **options, recorded=True)
    launches, graphs, replays = zip(*noted["by_step"], strict=True)
    # Two micro-batches, each of a shape of its own, that come again at the second step.
    assert (graphs, replays) == ((0, 4, 0), (0, 4, 4))
    assert launches[2] <= 2 * LAUNCHED < launches[0]
    assert waits_of(noted) == {"read": "event"}


@pytest.mark.thorough
def test_passes_whose_activations_do_not_fit_twice_are_not_captured(fake_device):
    # 8 GiB of activations, on a card of 12 GB.
    options = {"layers": 5, "rows": 64, "steps": 3, "card": "3060"}
    noted = train(fake_device, "opt-1.3b", **options, recorded=True)
    assert [each[1:] for each in noted["by_step"]] == [[0, 0]] * 3
    smaller = train(fake_device, "opt-1.3b", **options | {"rows": 16}, recorded=True)
    assert smaller["by_step"][1][1:] == [4, 4]
