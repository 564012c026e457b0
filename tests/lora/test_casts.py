"""Copies of factors in the type of the weights: made once, and nothing else changes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.lora.model import adapter_layers, apply_lora
from helpers.tiny import tiny_model


class Casts(TorchDispatchMode):
    """Counts changes of type of matrices that are no activations."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._schema.name == "aten::_to_copy":
            self.count += tuple(args[0].shape) in self.shapes
        return operation(*args, **(kwargs or {}))


def adapted(kind, dtype):
    model = tiny_model(kind).to(dtype)
    apply_lora(model, LoraConfig(lora_dim=3), seed=0)
    model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(1)
    for layer in adapter_layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.3, generator=generator)
    return model


def gradients(model):
    model.zero_grad()
    ids = torch.arange(3, 15).view(2, 6)
    loss = model(ids).logits.float().logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), [layer.lora_A.grad.clone() for layer in adapter_layers(model).values()]


@pytest.mark.parametrize("kind", ["opt", "gpt2", "qwen3_moe"])
def test_a_pass_with_copies_equals_one_without_and_casts_no_factor(kind):
    model = adapted(kind, torch.bfloat16)
    layers = adapter_layers(model).values()
    shapes = {tuple(f.shape) for layer in layers for f in (layer.lora_A, layer.lora_B)}
    copies = FactorCasts(model)
    for scale in (1.0, 1.5):  # the second time as after a step
        with torch.no_grad():
            for layer in layers:
                layer.lora_A.mul_(scale)
        with Casts(shapes) as plain:
            expected = gradients(model)
        with copies.in_use(), Casts(shapes) as cast:
            found = gradients(model)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert all(gradient.dtype == torch.float32 for gradient in found[1])
        assert plain.count - cast.count == 4 * len(layers), "A and B, forward and backward"
    assert all(layer.casts is None for layer in layers)


def test_float32_weights_need_no_copies():
    model = adapted("opt", torch.float32)
    with FactorCasts(model).in_use():
        assert all(layer.casts is None for layer in adapter_layers(model).values())
