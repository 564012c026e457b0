"""Bottleneck adapters in the layers of BERT and RoBERTa, in place of LoRA."""

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import get_activation

AdapterType = Literal["houlsby", "pfeiffer"]


class BottleneckAdapter(nn.Module):
    """``(x, residual) -> residual + B act(A x)``, with A and B linear layers with biases."""

    def __init__(self, features: int, size: int, activation: str) -> None:
        super().__init__()
        self.adapter_A = nn.Linear(features, size)
        self.act = get_activation(activation)
        self.adapter_B = nn.Linear(size, features)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """(..., features) each -> (..., features)."""
        output: Tensor = residual + self.adapter_B(self.act(self.adapter_A(x)))
        return output


class AdaptedOutput(nn.Module):
    """The end of an attention or feed-forward block, with an adapter before its sum and norm.

    Houlsby's reads what the block adds to its input (arXiv:1902.00751); Pfeiffer's reads it after
    the block's own sum and norm (arXiv:2005.00247). Names in the state dict are those of the
    base, and ``adapter.adapter_A``, ``adapter.adapter_B``.
    """

    def __init__(self, base: nn.Module, kind: AdapterType, size: int) -> None:
        super().__init__()
        self.dense = base.get_submodule("dense")
        self.LayerNorm = base.get_submodule("LayerNorm")
        self.dropout = base.get_submodule("dropout")
        features = len(self.LayerNorm.get_parameter("weight"))
        self.kind = kind
        self.adapter = BottleneckAdapter(features, size, "swish" if kind == "houlsby" else "relu")

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """(..., in) of the block's inside and (..., features) of its input -> (..., features)."""
        added = self.dropout(self.dense(hidden_states))
        read = self.LayerNorm(added + input_tensor) if self.kind == "pfeiffer" else added
        output: Tensor = self.LayerNorm(self.adapter(read, added) + input_tensor)
        return output


def add_adapters(model: PreTrainedModel, kind: AdapterType, size: int, *, std: float) -> None:
    """Put adapters into every layer of the encoder: A and B drawn from N(0, ``std``), no bias.

    The numbers come from the global random state. Everything in the encoder but the adapters is
    frozen.

    Raises:
        ValueError: if the encoder's layers are built otherwise than BERT's.
    """
    body: nn.Module = model.base_model
    layers = getattr(getattr(body, "encoder", None), "layer", None)
    if layers is None or not hasattr(layers[0].output, "LayerNorm"):
        raise ValueError(
            f"--apply_adapter: a model of type {model.config.model_type!r} has other "
            "layers than BERT's and RoBERTa's; use --apply_lora"
        )
    body.requires_grad_(False)
    for layer in layers:
        if kind == "houlsby":
            layer.attention.output = AdaptedOutput(layer.attention.output, kind, size)
        layer.output = AdaptedOutput(layer.output, kind, size)
    for name, parameter in body.named_parameters():
        if is_adapter(name):
            with torch.no_grad():
                parameter.normal_(std=std) if parameter.ndim > 1 else parameter.zero_()


def is_adapter(name: str) -> bool:
    """Whether a name in the state dict is that of an adapter's parameter."""
    return ".adapter." in name
