"""The course of a run: what its meter is told of the engine."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.supervised import train as course
from helpers.tiny import tiny_model


@pytest.mark.parametrize(("attention", "skips"), [("sdpa", True), ("eager", False)])
def test_meter_counts_padding_where_the_engine_computes_it(attention, skips, monkeypatch):
    monkeypatch.setattr(course, "world_size", lambda: 1)
    told = {}
    monkeypatch.setattr(course, "Meter", lambda shape, **options: told.update(options))
    network = CausalLMLoss(tiny_model("opt", attention))
    setup = SimpleNamespace(
        adapted=SimpleNamespace(model=network.model),
        config=SupervisedConfig(),
        settings=SimpleNamespace(torch_dtype=torch.float32),
    )
    course.make_meter(setup, SimpleNamespace(module=network, device=torch.device("cpu")))
    assert told["skips_padding"] is skips
