"""A layer of ``silu(gate) * x``, which forms that product again in its backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from dschat_lora.lora.layers import LoraLinear, gated
from dschat_lora.lora.nf4 import quantize


def drawn(base=None, **options):
    torch.manual_seed(0)
    layer = LoraLinear(base or nn.Linear(5, 4), r=2, scaling=0.7, **options).double()
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    layer.weight.requires_grad_(False)
    x, gate = torch.randn(2, 2, 3, layer.in_features, dtype=torch.float64).unbind()
    return layer, x.requires_grad_(), gate.requires_grad_()


def both(layer, x, gate, leaves):
    """Output and gradients of the layer given the gate, and of the product written out."""
    values = []
    for read in (layer, lambda x, gate: layer(F.silu(gate) * x)):
        torch.manual_seed(3)
        output = read(x, gate)
        values.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    return values


def kept_numbers(function):
    """Sizes of what autograd keeps of ``function``, weights apart, and its result."""
    sizes = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    return sorted(sizes.values()), output


@pytest.mark.parametrize("kind", ["Linear", "Conv1D", "trained weight", "off"])
def test_first_and_second_derivatives_are_those_of_finite_differences(kind):
    layer, x, gate = drawn(Conv1D(4, 5) if kind == "Conv1D" else None)
    layer.weight.requires_grad_(kind == "trained weight")
    layer.enabled = kind != "off"
    parameters = [p for p in layer.parameters() if p.requires_grad and layer.enabled]

    def function(x, gate, *_):
        return layer(x, gate)

    torch.testing.assert_close(layer(x, gate), layer(F.silu(gate) * x))
    assert torch.autograd.gradcheck(function, (x, gate, *parameters))
    assert torch.autograd.gradgradcheck(function, (x, gate, *parameters))


def test_with_dropout_gradients_are_those_of_the_product_written_out():
    layer, x, gate = drawn(dropout=0.5)
    torch.testing.assert_close(*both(layer, x, gate, (x, gate, layer.lora_A, layer.lora_B)))


@pytest.mark.parametrize("frozen", [False, True], ids=["flowing", "frozen below"])
def test_of_the_mlp_its_two_inputs_are_kept(frozen):
    layer, x, gate = drawn()
    if frozen:
        x, gate = x.detach(), gate.detach()
    kept, _ = kept_numbers(lambda: layer(x, gate))
    assert kept == [2 * 3 * layer.r, x.numel(), gate.numel()]
    torch.testing.assert_close(*both(layer, x, gate, (layer.lora_A, layer.lora_B)))


def test_a_quantised_layer_forms_its_input_again_too():
    layer, x, gate = drawn(nn.Linear(64, 4, bias=False))
    layer.float().weight = quantize(torch.randn(4, 64), dtype=torch.float32)
    x, gate = (each.detach().float().requires_grad_() for each in (x, gate))
    for value, expected in zip(*both(layer, x, gate, (x, gate, layer.lora_A)), strict=True):
        assert (value - expected).norm() <= 1e-6 * expected.norm()


def test_the_product_alone_keeps_its_factors():
    _, x, gate = drawn()
    kept, output = kept_numbers(lambda: gated(x, gate))
    assert kept == [x.numel(), gate.numel()]
    torch.testing.assert_close(output, F.silu(gate) * x)
    assert torch.autograd.gradcheck(gated, (x, gate))
    assert torch.autograd.gradgradcheck(gated, (x, gate))
