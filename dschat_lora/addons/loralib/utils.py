"""Freezing, saving and merging of models with the layers of ``loralib``."""

import copy
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from dschat_lora.addons.loralib.layers import ConvLoRA, Embedding, FrozenLinear, LoRALayer, wide
from dschat_lora.lora.model import AdapterLayer

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Bias = Literal["none", "all", "lora_only"]


def mark_only_lora_as_trainable(model: nn.Module, bias: Bias = "none") -> None:
    """Freeze what is no factor, but for no, all, or adapted layers' biases (none, all, lora_only).

    Raises:
        ValueError: at another ``bias``; nothing is frozen then.
    """
    _check_bias(bias)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad_(bias == "all" and "bias" in name)
    if bias == "lora_only":
        for module in model.modules():
            own = getattr(module, "bias", None)
            if isinstance(module, LoRALayer) and own is not None:
                own.requires_grad_(True)


def lora_state_dict(model: nn.Module, bias: Bias = "none") -> dict[str, Tensor]:
    """Factors and the biases of ``bias`` (lora_only: of this package's layers), by name.

    Buffers are none of them, whatever their name: GPT-2's causal masks were called ``bias``.

    Raises:
        ValueError: at another ``bias``.
    """
    _check_bias(bias)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layers = {name for name, each in model.named_modules() if isinstance(each, LoRALayer)}
    biases = {name for name in names if "bias" in name}
    # That of a convolution is in a module below it.
    owned = {name for name in biases if name.rpartition(".")[0].removesuffix(".conv") in layers}
    owned |= biases & ({"bias", "conv.bias"} if "" in layers else set())
    wanted = {"none": set[str](), "all": biases, "lora_only": owned}[bias]
    state = model.state_dict()
    return {name: state[name] for name in state if name in wanted or "lora_" in name}


@torch.no_grad()
def merged_copy(module: ModuleT) -> ModuleT:
    """A copy whose layers are plain (``r`` 0) and hold ``W + update``; ``module`` stays as it is.

    The update is added in float32 and rounded once to the type of W. A weight tied to another
    module's is its own in the copy.

    Raises:
        ValueError: at a layer of :func:`dschat_lora.lora.model.apply_lora`, which
            :func:`dschat_lora.lora.merge.merged_state_dict` merges.
    """
    merged = copy.deepcopy(module)
    for name, layer in merged.named_modules():
        if isinstance(layer, AdapterLayer):
            raise ValueError(f"{name} was adapted by apply_lora: merge it by merged_state_dict")
        if isinstance(layer, FrozenLinear | Embedding | ConvLoRA) and layer.r > 0:
            if hasattr(layer, "lora_A"):
                owner = layer.conv if isinstance(layer, ConvLoRA) else layer
                weight = wide(layer.weight) + layer.delta()
                owner.weight = nn.Parameter(weight.to(layer.weight.dtype))
                del layer.lora_A, layer.lora_B
            layer.weight.requires_grad_(True)
            layer.r, layer.scaling = 0, 0.0
    return merged


def _check_bias(bias: str) -> None:
    if bias not in ("none", "all", "lora_only"):
        raise ValueError(f"bias must be none, all or lora_only, got {bias!r}")
