"""Which models' passes of training run as CUDA graphs, and what is said of others."""

from dataclasses import replace

import pytest
import torch

from benchmarks.common import shapes
from dschat_lora.config.groups import LoadConfig, LoraConfig, ModelConfig
from dschat_lora.engine.distributed import planned_processes
from dschat_lora.lora.model import apply_lora
from dschat_lora.perf.cards import tabled_peak
from dschat_lora.runtime import graphs
from dschat_lora.runtime.graphs import plan_graphs, takes_graphs
from dschat_lora.runtime.memory import TrainedModel, plan_memory
from helpers.runs import engine_settings

H200 = tabled_peak("NVIDIA H200", torch.bfloat16)


def trained(name="opt-1.3b", *, layers=None, lora_dropout=0.0, stage=0, **grid):
    size = shapes.SHAPES[name]
    size = replace(size, num_layers=layers or size.num_layers)
    model = shapes.meta_base(size, dtype=torch.bfloat16)
    model.requires_grad_(False)
    apply_lora(model, LoraConfig(lora_dim=16, lora_dropout=lora_dropout), seed=0)
    grid = {"rows": 4, "length": 512, "recomputes": False} | grid
    return TrainedModel(model, engine_settings(dtype="bf16", stage=stage), **grid)


@pytest.fixture(autouse=True)
def on_gpu():
    """A GPU is planned for, and nothing computes."""
    with planned_processes(1):
        yield


@pytest.mark.parametrize(
    ("name", "rows", "taken"),
    [
        # 24 x 66 + 80 kernels of 60 us: 100 ms. 512 tokens are 2.8 TFLOP, 7 ms at 40 % of 989.
        ("opt-1.3b", 1, True),
        ("opt-1.3b", 16, False),
        # 32 x 96 + 80 of 60 us: 189 ms. 512 tokens are 4.2 products of 8e9 weights, 44 ms
        ("llama-3-8b", 1, True),
        ("llama-3-8b", 8, False),
    ],
)
def test_auto_takes_graphs_where_launching_takes_longer_than_the_work(name, rows, taken):
    one = trained(name, rows=rows)
    assert takes_graphs(one, LoadConfig(), peak=H200) is taken
    assert not takes_graphs(one, LoadConfig(), peak=None)
    assert takes_graphs(one, LoadConfig(training_graphs="on"), peak=None)
    assert not takes_graphs(one, LoadConfig(training_graphs="off"), peak=H200)


REFUSED = {
    "--compile changes the operations of the blocks": ({}, {"compile": True}),
    "--lora_dropout 0.1 would draw different random numbers for padded rows": (
        {"lora_dropout": 0.1},
        {},
    ),
    "--neftune_noise_alpha is not recorded": ({}, {"neftune_noise_alpha": 5.0}),
    "--router_aux_loss_coef is not recorded": ({}, {"router_aux_loss_coef": 0.01}),
    "gradients of ZeRO 3 are managed by DeepSpeed and not accumulated in place": ({"stage": 3}, {}),
    "--context_parallel_size splits rows by their lengths": ({"processes": 2}, {}),
    "--offload_activations copies to the host, which cannot be recorded": ({"offloads": True}, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_graphs_cannot_have_is_known_before(reason):
    facts, options = REFUSED[reason]
    one = trained("opt-1.3b", layers=1, rows=1, **facts)
    assert not takes_graphs(one, ModelConfig(**options), peak=H200)
    with pytest.raises(ValueError, match="--training_graphs on") as caught:
        plan_graphs(None, {"model": one}, ModelConfig(training_graphs="on", **options), free=0)
    assert str(caught.value) == f"--training_graphs on: {reason}; use auto or off"


def test_dropout_of_the_base_is_named_by_its_option():
    one = trained("opt-1.3b", layers=1)
    one.model.model.decoder.layers[0].dropout = 0.2
    assert graphs.obstacle(one, LoadConfig()) == (
        "--dropout 0.2 would draw different random numbers for padded rows"
    )


def test_a_gpu_without_the_kernel_of_sequences_takes_none():
    one = trained("opt-1.3b", layers=1)
    with planned_processes(1, has_varlen=False):
        assert "masked attention" in graphs.obstacle(one, LoadConfig())


def test_auto_takes_graphs_where_their_memory_fits_too(monkeypatch):
    monkeypatch.setattr(graphs, "peak_here", lambda dtype: H200)
    one = trained("opt-1.3b", layers=2, rows=1)
    plan, kept = plan_memory([one]), one.estimated().activations
    enough = (plan.peak + kept) / 0.9
    for free, option, taken in (
        (enough + 9, "auto", True),
        (enough - 9, "auto", False),
        (0, "on", True),
    ):
        load = LoadConfig(training_graphs=option)
        needed, names = plan_graphs(plan, {"model": one}, load, free=free)
        assert names == ["model"] * taken
        # They are kept while responses are drawn, too.
        assert needed.graphs == taken * kept
        assert (", CUDA graphs " in needed.line(of_parts=False)) == taken
        assert needed.peak - plan.peak == taken * kept


def test_a_cpu_takes_none(monkeypatch):
    monkeypatch.setattr(graphs, "device_type", lambda: "cpu")
    one = {"model": trained("opt-1.3b", layers=1)}
    assert plan_graphs(None, one, LoadConfig(), free=0) == (None, [])
    words = "^--training_graphs on: CUDA graphs need a GPU; use auto or off$"
    with pytest.raises(ValueError, match=words):
        plan_graphs(None, one, LoadConfig(training_graphs="on"), free=0)
