"""Linear layers that let go of their weights between the passes."""

import weakref

import pytest
import torch
from torch import nn

from dschat_lora.engine.zero import free_between_passes


def layers(*, bias=True, frozen=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4, bias=bias))
    return model.double().requires_grad_(not frozen)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (0, 6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_are_those_of_torch(shape, bias, frozen):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for free in (False, True):
        model, given = layers(bias=bias, frozen=frozen), x.clone().requires_grad_()
        if free:
            free_between_passes(model)
        output = model(given)
        output.square().sum().backward()
        results.append([output, given.grad, *(p.grad for p in model.parameters())])
    for expected, ours in zip(*results, strict=True):
        assert (expected is None) == (ours is None)
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_autocast_computes_in_its_type():
    model = layers().float()
    free_between_passes(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model[0](torch.ones(2, 6))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(model[0].weight.grad, torch.full((5, 6), 2.0))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("free", [False, True])
def test_a_weight_that_is_given_up_after_the_forward_pass_takes_no_memory(free, frozen):
    model = layers(frozen=frozen)
    if free:
        free_between_passes(model)
    output = model(torch.ones(2, 6, dtype=torch.float64, requires_grad=True))
    weight = model[2].weight
    values, held = weight.detach().clone(), weakref.ref(weight.untyped_storage())
    weight.data = torch.empty(0, dtype=torch.float64)  # as ZeRO 3 does
    assert (held() is None) == free
    weight.data = values
    output.sum().backward()
