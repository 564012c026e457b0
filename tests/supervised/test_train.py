"""The course of a run: what its meter is told of the engine."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.config.data import DataConfig
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.runtime.loop import check_repeats
from dschat_lora.supervised import train as course
from dschat_lora.supervised.loop import TrainSchedule
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


@pytest.mark.parametrize(
    ("times", "steps", "used"),
    [
        (0.1 + 0.2 + 0.7 + 1e-12, 20, 2),  # each row once an epoch, but for rounding
        (1.5, 20, 4),  # half of the rows twice in each of two epochs
        (0.5, 31, 4),  # half of them once in each, and perhaps again in the fourth one
    ],
)
def test_no_row_is_used_more_often_than_it_may_be(times, steps, used):
    def check(bound):
        data = DataConfig(data_path=("a", "b"), max_repeats=(0, bound))
        check_repeats(data, {"a": 9.0, "b": times}, TrainSchedule(steps, 10, 0, 1))

    check(used)
    with pytest.raises(ValueError, match=f"would use rows of b {used} times; give it a smaller"):
        check(used - 1)
