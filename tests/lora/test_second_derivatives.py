"""Second derivatives and per-sample gradients of every layer."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers.pytorch_utils import Conv1D

from dschat_lora.lora.groups import Groups, PackedLoraLinear
from dschat_lora.lora.layers import LoraEmbedding, LoraLinear
from dschat_lora.lora.trained import TrainedBias, TrainedModule
from helpers.addons import of_addon

KEYS = Groups((2, 1, 2), (True, False, True))
LAYERS = {
    "LoraLinear": lambda: LoraLinear(nn.Linear(3, 4), r=2, scaling=1.5),
    "transposed": lambda: LoraLinear(Conv1D(4, 3), r=2, scaling=1.5),
    "PackedLoraLinear": lambda: PackedLoraLinear(nn.Linear(3, 5), r=1, scaling=2.0, groups=KEYS),
    "LoraEmbedding": lambda: LoraEmbedding(nn.Embedding(5, 3), r=2, scaling=1.5),
    "TrainedBias": lambda: TrainedBias(nn.Linear(3, 4)),
    "TrainedModule": lambda: TrainedModule(nn.Linear(3, 4)),
}
for lora in of_addon("loralib.layers"):
    LAYERS |= {
        "Conv1d": lambda lora=lora: lora.Conv1d(2, 3, 2, r=1),
        "Linear": lambda lora=lora: lora.Linear(3, 4, r=2, lora_alpha=3),
        "MergedLinear": lambda lora=lora: lora.MergedLinear(
            3, 6, r=1, enable_lora=[True, False, True], fan_in_fan_out=True
        ),
        "Embedding": lambda lora=lora: lora.Embedding(5, 3, r=2),
        "Conv2d": lambda lora=lora: lora.Conv2d(1, 2, 2, r=1),
        "Conv3d": lambda lora=lora: lora.Conv3d(1, 1, 2, r=1),
    }
SHAPES = {"Conv1d": (2, 4), "Conv2d": (1, 3, 3), "Conv3d": (1, 2, 2, 2)}


def made(name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    for key, parameter in layer.named_parameters():
        parameter.requires_grad_("lora_" in key or "trained" in key)
    return layer


def given(name, count=2):
    if "Embedding" in name:
        return torch.arange(2 * count).view(count, 2) % 5
    return torch.randn(count, *SHAPES.get(name, (2, 3)), dtype=torch.float64)


def trained(layer):
    return {name: p for name, p in layer.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", [*LAYERS, "LoraLinear, all of it"])
def test_second_derivatives_are_those_of_finite_differences(name):
    layer, x = made(name.partition(",")[0]), given(name)
    if "all of it" in name:
        layer.requires_grad_(True)
    names = list(trained(layer))
    if x.is_floating_point():
        x.requires_grad_()

    def output(x, *values):
        # Not linear in any input, so that no second derivative is zero.
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,)).sin()

    inputs = (x, *(p.detach().requires_grad_() for p in trained(layer).values()))
    assert torch.autograd.gradcheck(output, inputs)
    assert torch.autograd.gradgradcheck(output, inputs)
    if x.is_floating_point():  # the fast backward pass leaves no graph behind
        first, graph = (
            torch.autograd.grad(output(*inputs).sum(), inputs, create_graph=c)
            for c in (False, True)
        )
        assert not any(each.requires_grad for each in first)
        assert all(each.requires_grad for each in graph)
        torch.testing.assert_close(first, graph)


@pytest.mark.parametrize("name", LAYERS)
def test_per_sample_gradients_are_those_of_a_loop(name):
    layer, x = made(name), given(name, count=3)
    parameters = {key: p.detach() for key, p in trained(layer).items()}

    def loss(parameters, row):
        return functional_call(layer, parameters, (row[None],)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for number, row in enumerate(x):
        own = copy.deepcopy(layer)
        own(row[None]).square().sum().backward()
        for key, parameter in trained(own).items():
            torch.testing.assert_close(together[key][number], parameter.grad)
