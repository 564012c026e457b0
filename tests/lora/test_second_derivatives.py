"""Second derivatives and per-sample gradients of every layer, and more of loralib's names."""

import copy

import loralib
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from transformers.pytorch_utils import Conv1D

import dschat_lora.lora.loralib as lora
from dschat_lora.lora.groups import Groups, PackedLoraLinear
from dschat_lora.lora.layers import LoraEmbedding, LoraLinear
from dschat_lora.lora.loralib.layers import LoraConv, LoRALayer
from dschat_lora.lora.loralib.utils import lora_state_dict, mark_only_lora_as_trainable
from dschat_lora.lora.trained import TrainedBias, TrainedModule

KEYS = Groups((2, 1, 2), (True, False, True))
LAYERS = {
    "LoraLinear": lambda: LoraLinear(nn.Linear(3, 4), r=2, scaling=1.5),
    "transposed": lambda: LoraLinear(Conv1D(4, 3), r=2, scaling=1.5),
    "PackedLoraLinear": lambda: PackedLoraLinear(nn.Linear(3, 5), r=1, scaling=2.0, groups=KEYS),
    "LoraEmbedding": lambda: LoraEmbedding(nn.Embedding(5, 3), r=2, scaling=1.5),
    "LoraConv": lambda: LoraConv(nn.Conv1d(2, 3, 2), r=1),
    "TrainedBias": lambda: TrainedBias(nn.Linear(3, 4)),
    "TrainedModule": lambda: TrainedModule(nn.Linear(3, 4)),
    "Linear": lambda: lora.Linear(3, 4, r=2, lora_alpha=3),
    "MergedLinear": lambda: lora.MergedLinear(
        3, 6, r=1, enable_lora=[True, False, True], fan_in_fan_out=True
    ),
    "Embedding": lambda: lora.Embedding(5, 3, r=2),
    "Conv2d": lambda: lora.Conv2d(1, 2, 2, r=1),
    "Conv3d": lambda: lora.Conv3d(1, 1, 2, r=1),
}
SHAPES = {"LoraConv": (2, 4), "Conv2d": (1, 3, 3), "Conv3d": (1, 2, 2, 2)}


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


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_are_those_of_finite_differences(name):
    layer, x = made(name), given(name)
    names = list(trained(layer))
    if x.is_floating_point():
        x.requires_grad_()

    def output(x, *values):
        # Not linear in any input, so that no second derivative is zero.
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,)).sin()

    inputs = (x, *(p.detach().requires_grad_() for p in trained(layer).values()))
    assert torch.autograd.gradcheck(output, inputs)
    assert torch.autograd.gradgradcheck(output, inputs)


def test_a_weight_and_a_bias_that_train_have_second_derivatives_too():
    layer, x = made("Linear").requires_grad_(True), given("Linear").requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def output(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,)).sin()

    assert torch.autograd.gradgradcheck(output, (x, *values))


def test_first_derivatives_alone_take_no_part_of_the_graph():
    """The fast backward pass leaves none behind."""
    layer, x = made("LoraLinear"), given("LoraLinear")
    (one,) = torch.autograd.grad(layer(x).sum(), layer.lora_A)
    assert not one.requires_grad
    (again,) = torch.autograd.grad(layer(x).sum(), layer.lora_A, create_graph=True)
    assert again.requires_grad
    torch.testing.assert_close(one, again)


@pytest.mark.parametrize("name", LAYERS)
def test_per_sample_gradients_are_those_of_a_loop(name):
    layer, x = made(name), given(name, count=3)
    parameters = {key: p.detach() for key, p in trained(layer).items()}

    def loss(parameters, row):
        return functional_call(layer, parameters, (row[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for number, row in enumerate(x):
        own = copy.deepcopy(layer)
        own(row[None]).square().sum().backward()
        for key, parameter in trained(own).items():
            torch.testing.assert_close(found[key][number], parameter.grad)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_parts_of_a_merged_update_are_loralibs(transposed):
    options = {"r": 2, "lora_alpha": 6, "enable_lora": [True, False, True]}
    ours, theirs = (
        each.MergedLinear(4, 9, fan_in_fan_out=transposed, **options) for each in (lora, loralib)
    )
    with torch.no_grad():
        theirs.lora_B.normal_()
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.lora_ind, theirs.lora_ind)
    torch.testing.assert_close(ours.merge_AB(), theirs.merge_AB())
    rows = torch.randn(6, 2)
    assert torch.equal(ours.zero_pad(rows), theirs.zero_pad(rows))


def test_a_convolution_of_any_module_is_made_and_named_as_loralibs():
    ours = lora.ConvLoRA(nn.Conv2d, 2, 3, 3, r=1, lora_alpha=2, padding=1)
    theirs = loralib.ConvLoRA(nn.Conv2d, 2, 3, 3, r=1, lora_alpha=2, padding=1)
    with torch.no_grad():
        theirs.lora_B.normal_()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 2, 5, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    assert isinstance(lora.Conv2d(2, 3, 3), lora.ConvLoRA)
    assert isinstance(ours, LoRALayer)


def test_every_bias_that_trains_is_saved():
    """Of a layer of rank 0 and of one without enabled groups too."""
    model = nn.ModuleDict(
        {
            "linear": lora.Linear(3, 3, r=1),
            "plain": lora.Linear(3, 3),
            "merged": lora.MergedLinear(3, 4, r=1, enable_lora=[False, False]),
            "conv": lora.Conv1d(1, 1, 1, r=1),
            "head": nn.Linear(3, 3),
        }
    )
    for bias in ("none", "lora_only", "all"):
        mark_only_lora_as_trainable(model, bias=bias)
        trains = {name for name, p in model.named_parameters() if p.requires_grad}
        assert lora_state_dict(model, bias=bias).keys() == trains
        for name, layer in model.items():
            own = {key for key, p in layer.named_parameters() if p.requires_grad}
            assert lora_state_dict(layer, bias=bias).keys() == own, name
