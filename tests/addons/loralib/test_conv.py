"""Convolutions with a low-rank update, against a kernel that holds the update."""

import copy

import pytest
import torch
from torch import nn

from dschat_lora.addons.loralib.layers import ConvLoRA
from dschat_lora.lora.layers import draw_keep
from lora.toy import randomise

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def adapted(base, **options):
    """The base with an update of random factors."""
    values = copy.deepcopy(base.state_dict())
    settings = {"r": 2, "lora_alpha": 3} | options
    layer = ConvLoRA(lambda *_: base, base.in_channels, base.out_channels, 0, **settings)
    base.load_state_dict(values)
    randomise([layer.lora_A, layer.lora_B])
    return layer


def with_update(base, layer):
    """``base`` with the elements of B A, in their order, added to those of its kernel."""
    merged = copy.deepcopy(base)
    update = 1.5 * (layer.lora_B @ layer.lora_A)
    with torch.no_grad():
        merged.weight += update.reshape(base.weight.shape)
    return merged


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("dims", KINDS)
def test_the_update_is_added_to_the_kernel(dims, kernel, groups):
    torch.manual_seed(0)
    base = KINDS[dims](4, 6, kernel, groups=groups)
    layer = adapted(copy.deepcopy(base)).train()
    assert layer.lora_A.shape == (2 * kernel, 4 * kernel)
    assert layer.lora_B.shape == (6 // groups * kernel ** (dims - 1), 2 * kernel)
    x = torch.randn(2, 4, *[5, 6, 7][:dims])
    expected = with_update(base, layer)(x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-5)
    assert (expected - base(x)).abs().max() > 0.05
    unequal = adapted(nn.Conv3d(4, 6, (2, 3, 5)))
    assert (unequal.lora_A.shape, unequal.lora_B.shape) == ((2 * 5, 4 * 5), (6 * 2 * 3, 2 * 5))


GEOMETRIES = {
    "unequal kernel": {"kernel_size": (3, 1)},
    "stride and padding": {"kernel_size": 3, "stride": (2, 1), "padding": (1, 2)},
    "dilation": {"kernel_size": (2, 3), "dilation": (2, 1)},
    "same": {"kernel_size": (3, 5), "padding": "same", "groups": 2},
    "circular": {"kernel_size": (3, 2), "padding": (2, 1), "padding_mode": "circular"},
    "reflected": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect", "bias": False},
}


@pytest.mark.parametrize("options", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_geometry_of_torch_holds_for_the_update_too(options):
    torch.manual_seed(0)
    base = nn.Conv2d(4, 6, **options)
    layer = adapted(copy.deepcopy(base))
    x = torch.randn(2, 4, 7, 8)
    torch.testing.assert_close(layer(x), with_update(base, layer)(x), rtol=0, atol=1e-5)


def test_gradients_reach_the_factors_as_those_of_the_kernel():
    layer = adapted(nn.Conv2d(4, 6, 3).requires_grad_(False)).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    kernel = (layer.weight + layer.delta()).detach().requires_grad_()
    torch.nn.functional.conv2d(x, kernel).square().sum().backward()
    bias = layer.bias[:, None, None]
    (layer(x) - bias).square().sum().backward()
    grad = 1.5 * kernel.grad.reshape(6 * 3, 4 * 3)
    torch.testing.assert_close(layer.lora_B.grad, grad @ layer.lora_A.T, rtol=0, atol=1e-9)
    torch.testing.assert_close(layer.lora_A.grad, layer.lora_B.T @ grad, rtol=0, atol=1e-9)
    assert layer.weight.grad is None


def test_dropout_acts_on_the_input_of_the_update_alone():
    torch.manual_seed(0)
    base = nn.Conv1d(4, 6, 3)
    layer = adapted(copy.deepcopy(base), lora_dropout=0.5).train()
    x = torch.randn(2, 4, 9)
    torch.manual_seed(1)
    keep = draw_keep(x, 0.5)
    torch.manual_seed(1)
    expected = base(x) + nn.functional.conv1d(2 * x * keep, layer.delta())
    torch.testing.assert_close(layer(x), expected)
    layer.eval()
    torch.testing.assert_close(layer(x), with_update(base, layer)(x))


def test_a_16_bit_base_does_not_round_the_update_away():
    torch.manual_seed(0)
    base = nn.Conv1d(4, 6, 3, bias=False).to(torch.bfloat16)
    layer = adapted(copy.deepcopy(base))
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32
    with torch.no_grad():
        layer.lora_B.mul_(1e-5)
        layer.weight.fill_(1.0)
    half = torch.randn(1, 2, 9)
    x = torch.cat([half, -half], 1).to(torch.bfloat16)  # of which the base makes nothing
    expected = nn.functional.conv1d(x.float(), layer.delta())
    torch.testing.assert_close(layer(x).float(), expected, rtol=0.02, atol=1e-7)
    # 1 + 1e-5 is 1 in bfloat16.
    assert torch.equal(with_update(layer.conv, layer).weight, layer.weight)


def test_the_base_is_adopted_and_never_changes():
    torch.manual_seed(0)
    base = nn.Conv2d(4, 6, 3)
    before = copy.deepcopy(base.state_dict())
    layer = adapted(base)
    layer.lora_B.data.zero_()
    assert layer.weight is base.weight
    assert set(layer.state_dict()) == {"conv.weight", "conv.bias", "lora_A", "lora_B"}
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(layer(x), base(x))  # B is zero
    layer.bias.requires_grad_(False)
    trained = [p for p in layer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for _ in range(2):
        for mode in (True, False):
            layer.train(mode)(x).square().sum().backward()
            optimizer.step()
    assert not torch.allclose(layer(x), base(x))
    for name, value in before.items():
        assert torch.equal(layer.state_dict()[f"conv.{name}"], value)
