"""Layers that read one input, together and each by itself."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_lora.config.groups import LoraConfig
from dschat_lora.kernels import support
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import adapter_parameters, adapters_disabled, apply_lora
from dschat_lora.lora.nf4 import quantize
from dschat_lora.models.blocks import recompute_blocks
from helpers.tiny import tiny_model

IDS = torch.arange(3, 15).view(2, 6)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(support, "ON_CPU", True)


def adapted(kind="qwen2", **options):
    """In fp64, so that float32 factors are cast, and nothing is rounded."""
    model = tiny_model(kind).double()
    apply_lora(model, LoraConfig(**{"lora_dim": 3, **options}), seed=0)
    model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter_parameters(model).items():
        if name.endswith(("lora_B", "bias")):
            parameter.data.normal_(std=0.3, generator=generator)
    return model


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[str(operation.overloadpacket).removeprefix("aten.")] += 1
        return operation(*args, **(kwargs or {}))

    @property
    def total(self):
        return sum(self.counts[name] for name in ("mm", "addmm", "addmm_"))


def results(model, *, seed=0):
    """Logits and every gradient, in a pass that is counted."""
    torch.manual_seed(seed)
    model.zero_grad()
    with Products() as seen:
        logits = model(IDS).logits
        logits.logsumexp(-1).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}, seen.total


@pytest.mark.parametrize(
    ("kind", "recomputes", "options"),
    [
        *((kind, again, {}) for kind in ("llama", "qwen2", "qwen3") for again in (False, True)),
        ("qwen2", False, {"train_bias": "lora_only"}),
        ("qwen2", False, {"lora_dropout": 0.5}),
    ],
)
def test_equal_values_by_fewer_products(kind, recomputes, options):
    model = adapted(kind, **options).train()
    if recomputes:
        recompute_blocks(model)
    expected, separate = results(model)
    casts = FactorCasts(model)
    for _ in range(2):
        with casts.in_use():
            values, together = results(model)
        assert values.keys() == expected.keys()
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9, check_dtype=True)
    # q, k, v: 3 A forward and 3 grad A, one each; gate and up alike; of grad x, A's part
    layers = model.config.num_hidden_layers
    fewer = layers * ((2 + 2 + 2) + (1 + 1 + 1) + recomputes * (2 + 1))
    assert separate - together == (0 if "lora_dropout" in options else fewer)
    assert all(getattr(module, "shared", None) is None for module in model.modules())


def test_layers_that_are_switched_off_give_the_base_and_a_cpu_computes_each_by_itself(monkeypatch):
    model = adapted()
    with adapters_disabled(model):
        expected = model(IDS).logits
        with FactorCasts(model).in_use():
            assert torch.equal(model(IDS).logits, expected)
    with FactorCasts(model).in_use(), adapters_disabled(model):
        assert torch.equal(model(IDS).logits, expected)
    monkeypatch.setattr(support, "ON_CPU", False)
    with FactorCasts(model).in_use():
        assert all(getattr(module, "shared", None) is None for module in model.modules())


def block_of(*, bits=16):
    """Layers whose factors have another type than the values of their weights."""
    torch.manual_seed(0)
    block = torch.nn.Module()
    for name, out in (("q_proj", 6), ("k_proj", 4), ("v_proj", 2)):
        layer = LoraLinear(torch.nn.Linear(64, out, bias=False).double(), r=2, scaling=0.5)
        torch.nn.init.normal_(layer.lora_A)
        torch.nn.init.normal_(layer.lora_B)
        layer.weight.requires_grad_(False)
        if bits == 4:
            layer.double().weight = quantize(layer.weight.float(), dtype=torch.float32)
        setattr(block, name, layer)
    return block, [block.q_proj, block.k_proj, block.v_proj]


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1,)])
def test_outputs_that_nothing_uses_have_no_part_in_gradients(bits, used):
    block, layers = block_of(bits=bits)
    x = torch.randn(5, 64, dtype=torch.float32 if bits == 4 else torch.float64, requires_grad=True)
    leaves = [x, *(factor for i in used for factor in (layers[i].lora_A, layers[i].lora_B))]

    def gradients():
        outputs = [layer(x) for layer in layers]
        total = sum((i + 1) * outputs[i].square().sum() for i in used)
        plain = torch.autograd.grad(total, leaves, retain_graph=True)
        first = torch.autograd.grad(total, leaves, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), leaves)
        return [*outputs, *plain, *first, *second]

    expected = gradients()
    with FactorCasts(block).in_use():
        assert layers[0].shared is not None
        found = gradients()
    for value, wanted in zip(found, expected, strict=True):
        assert (value - wanted).norm() <= 1e-6 * wanted.norm()


def test_another_input_or_a_changed_one_is_computed_anew():
    block, layers = block_of()
    x, other = torch.randn(2, 5, 64, dtype=torch.float64).unbind()
    with FactorCasts(block).in_use():
        torch.testing.assert_close(layers[0](x), layers[0](x.clone()))
        found = layers[0](other), layers[1](x)
        x.mul_(2)
        found = *found, layers[2](x), layers[1](x)
        assert block.q_proj.shared._outputs
    expected = layers[0](other), layers[1](x / 2), layers[2](x), layers[1](x)
    torch.testing.assert_close(found, expected)
    with FactorCasts(block).in_use():
        layers[0](x)
        shared = block.q_proj.shared
    assert shared._input is None
    assert not shared._outputs
