"""The moving average of what the actor trains."""

import pytest
import torch
from torch import nn

from dschat_lora.models.average import MovingAverage


def model():
    layers = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1))
    layers[1].bias.requires_grad_(False)
    return layers


def set_to(layers, value):
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.fill_(value)


def values(average):
    return {name: float(tensor.flatten()[0]) for name, tensor in average.tensors()}


def test_average_is_the_recursion_from_where_it_began():
    layers = model()
    set_to(layers, 1.0)
    average = MovingAverage(layers, 0.75)
    assert set(values(average).values()) == {1.0}
    for weight in (5.0, -3.0):
        set_to(layers, weight)
        average.update()
    # 0.75 * 1 + 0.25 * 5 = 2; 0.75 * 2 - 0.25 * 3 = 0.75
    assert values(average) == {"0.weight": 0.75, "1.weight": 0.75}


def test_weights_do_not_see_their_average():
    layers = model()
    set_to(layers, 2.0)
    average = MovingAverage(layers, 0.5)
    set_to(layers, 4.0)
    average.update()
    assert all(bool((p == 4.0).all()) for p in layers.parameters())


def test_16_bit_weights_are_averaged_in_fp32():
    layers = model().bfloat16()
    set_to(layers, 1.0)
    average = MovingAverage(layers, 0.992)
    set_to(layers, 1.0078125)  # the next number of bf16
    average.update()
    averages = dict(average.tensors())
    assert all(each.dtype == torch.float32 for each in averages.values())
    assert float(averages["0.weight"][0, 0]) == pytest.approx(1 + 0.008 * 0.0078125, abs=2e-7)


def test_a_restored_average_goes_on(monkeypatch):
    monkeypatch.setattr("dschat_lora.models.average.broadcast_", lambda tensor: tensor)
    layers = model()
    set_to(layers, 1.0)
    average = MovingAverage(layers, 0.75)
    set_to(layers, 5.0)
    average.update()
    saved = dict(average.tensors())
    other = MovingAverage(layers, 0.75)
    assert values(other) != values(average)
    other.load(average.facts(), saved.__getitem__)
    for each in (average, other):
        each.update()
    assert values(other) == values(average) == {"0.weight": 2.75, "1.weight": 2.75}
    # what was saved is a copy
    assert float(saved["0.weight"][0, 0]) == 2.0
