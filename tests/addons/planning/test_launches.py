"""Kernels that are counted by rule, and when launching them is what takes time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.common import shapes
from dschat_lora.addons.planning import launches
from dschat_lora.addons.planning.launches import launch_advice, micro_batch_advice
from dschat_lora.config.groups import LoadConfig, LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.perf.launches import EFFICIENCY, LAUNCH_SECONDS, count_launches
from dschat_lora.runtime.memory import TrainedModel
from helpers.runs import engine_settings


def model_of(name, *, layers, lora_dim=16):
    shape = replace(shapes.SHAPES[name], num_layers=layers)
    model = shapes.meta_base(shape, dtype=torch.bfloat16)
    if lora_dim:
        model.requires_grad_(False)
        apply_lora(model, LoraConfig(lora_dim=lora_dim), seed=0)
    return model


def block(name, *, field, **options):
    """Kernels that one block more takes."""
    one, two = (getattr(count_launches(model_of(name, layers=n), **options), field) for n in (1, 2))
    return two - one


# As a simulated GPU counted them; tests/fakecuda/test_training.py compares those of today.
@pytest.mark.parametrize(
    ("name", "fused", "training", "recomputed", "decoding"),
    [
        ("opt-1.3b", True, 58, 80, 11),
        ("opt-1.3b", False, 58, 80, 16),
        ("llama-3-8b", False, 136, 184, 41),
        ("qwen3-4b", False, 180, 244, 57),
        ("llama-3-8b", True, 63, 87, 11),
        ("qwen3-4b", True, 67, 93, 11),
    ],
)
def test_a_block_launches_what_a_simulated_gpu_counts(name, fused, training, recomputed, decoding):
    assert block(name, field="training", fused=fused) == training
    again = block(name, field="training", fused=fused, recomputes=True)
    assert again == pytest.approx(recomputed, rel=0.05)
    assert block(name, field="decoding", fused=fused) == decoding


def test_fused_norms_and_rotations_are_fewer_kernels():
    # Llama has 2 norms a block of which 22 kernels become 2, Qwen3 4; and 33 others go: rotations
    # and the activation with what its gradient takes
    for name, norms in (("llama-3-8b", 2), ("qwen3-4b", 4)):
        kernels = [block(name, field="training", fused=fused) for fused in (True, False)]
        assert kernels[1] - kernels[0] == 20 * norms + 33
    assert block("opt-1.3b", field="training", fused=False) == 58


def test_weights_that_train_have_an_optimizer_each():
    whole = count_launches(model_of("opt-1.3b", layers=1, lora_dim=0)).training
    adapted = count_launches(model_of("opt-1.3b", layers=1)).training
    assert whole > adapted + 6 * 10


def test_advice_is_given_where_launching_takes_longer_than_the_work():
    assert launch_advice(0.02, 0.02, compiled=False) is None
    words = launch_advice(0.03, 0.02, compiled=False)
    assert words == (
        "launching kernels takes about 30 ms and their work 20 ms by estimate: larger "
        "micro-batches use the GPU better, and --compile launches fewer"
    )
    assert "--compile" not in launch_advice(0.03, 0.02, compiled=True)


@pytest.mark.parametrize(
    ("kernels", "milliseconds"),
    [(12 * 66 + 80, 371), (16 * 96 + 80, 873)],
    ids=["OPT-125M", "a Llama of a billion parameters"],
)
def test_launches_take_what_small_micro_batches_took_on_an_h100(kernels, milliseconds):
    """16,000 tokens in eight micro-batches, as benchmarks/README.md has them."""
    assert 8 * kernels * LAUNCH_SECONDS * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_training_and_scoring_reached_the_share_of_the_peak_that_is_planned_with():
    path = Path(__file__).resolve().parents[3] / "benchmarks/results/nvidia-h200.json"
    results = json.loads(path.read_text())
    cases = [c for c in results["throughput-1.3b"]["cases"] if c["case"] == "ours"]
    rates = [case["hardware_tflops_per_device"] for case in cases]
    works = results["ppo"]["cases"][0]["works"]
    names = ("scoring_tflops_per_device", "training_tflops_per_device")
    rates += [work["figures"][name] for work in works for name in names]
    peak = results["throughput-1.3b"]["matmul_tflops"]["table"]
    assert [each / peak for each in rates] == pytest.approx([EFFICIENCY] * len(rates), abs=0.05)


def test_a_micro_batch_of_few_tokens_waits_for_launches_on_a_gpu(monkeypatch):
    model = model_of("opt-1.3b", layers=24)

    def advice(peak=1000.0, **grid):
        monkeypatch.setattr(launches, "device_peak", lambda *of: peak)
        grid = {"length": 512, "recomputes": False, **grid}
        return micro_batch_advice(TrainedModel(model, engine_settings(), **grid), LoadConfig())

    assert advice(rows=1, peak=None) is None  # on a CPU
    # 24 x 58 + 80 kernels of 60 us: 88.3 ms; 512 tokens: 2.8 TFLOP at 400 TFLOP/s, 7 ms
    assert "launching kernels takes about 88 ms and their work 7 ms" in advice(rows=1)
    assert advice(rows=12) is not None
    assert advice(rows=14) is None
    assert advice(rows=8, peak=500.0) is None
    for grid in ({"sequences": 2}, {"tokens": 512}):
        assert "about 88 ms and their work 7 ms" in advice(rows=1, length=256, **grid)
