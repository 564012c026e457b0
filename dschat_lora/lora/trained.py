"""Biases and whole modules that train as float32 copies beside the frozen base."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.layers import (
    active_bias,
    conv1d,
    full_shape,
    is_conv1d,
    is_transposed,
    values_of,
)
from dschat_lora.lora.nf4 import NF4Linear, product


class TrainedBias(nn.Module):
    """A frozen linear layer or layer norm whose bias alone trains, as a float32 copy.

    Attributes:
        weight, bias: of the base, frozen. trained_bias: float32, in place of ``bias``.
    """

    weight: nn.Parameter

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.function = _biased_function(base)
        self.kind, self.enabled = type(base).__name__, True
        self.transposed = is_transposed(base)
        self.register_parameter("weight", base._parameters["weight"])
        self.bias = base.get_parameter("bias")
        self.trained_bias = float32_copy(self.bias)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """What the base computes, with the trained bias."""
        return self.function(x, self.weight, active_bias(self) if self.enabled else self.bias)

    def extra_repr(self) -> str:
        """Which layer the bias belongs to, for ``print(model)``."""
        return f"{self.kind}, features={full_shape(self.bias)[0]}"


class TrainedModule(nn.Module):
    """A module trained in full, as a float32 copy beside the frozen original.

    The copy is independent also where the original's weight is tied to another module's, so
    training an output head never moves the embedding.

    Attributes:
        base: the original. trained: its copy, which computes in float32.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        self.trained = float32_module(base).requires_grad_(True)
        self.train(base.training)

    def forward(self, *args: object, **kwargs: object) -> object:
        """What the original returns, in its dtype, computed with the trained weights.

        That may be a tuple, as of a router of experts.
        """
        if not self.enabled:
            return self.base(*args, **kwargs)
        # float32, unless DeepSpeed keeps the fp32 masters of all that trains.
        dtype = next(self.trained.parameters()).dtype
        args = tuple(_cast(value, dtype) for value in args)
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        output = self.trained(*args, **kwargs)
        dtype = next(self.base.parameters()).dtype
        if isinstance(output, tuple):
            return tuple(_cast(value, dtype) for value in output)
        return _cast(output, dtype)


def float32_copy(parameter: Tensor) -> nn.Parameter:
    """A trainable float32 copy, on the same device."""
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def float32_module(base: nn.Module) -> nn.Module:
    """A float32 copy of a module, whose quantised layers become plain ones."""
    if isinstance(base, NF4Linear):
        if base.transposed:
            raise ValueError(
                "--modules_to_save: a Conv1D layer in 4 bits cannot be trained in full; adapt it "
                "by --target_modules, or use --base_bits 16"
            )
        bias = base._parameters["bias"]
        plain = nn.Linear(base.in_features, base.out_features, bias is not None, device="meta")
        plain.weight = nn.Parameter(values_of(base.weight, torch.float32))
        plain.register_parameter("bias", None if bias is None else float32_copy(bias))
        return plain.train(base.training)
    inner = {id(m): float32_module(m) for m in base.modules() if isinstance(m, NF4Linear)}
    return copy.deepcopy(base, inner).float()


def _biased_function(base: nn.Module) -> Callable[[Tensor, Any, Any], Tensor]:
    if isinstance(base, NF4Linear):
        return product
    if isinstance(base, nn.Linear):
        return F.linear
    if is_conv1d(base):
        return conv1d
    if isinstance(base, nn.LayerNorm):
        shape, eps = base.normalized_shape, base.eps
        return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps)
    raise ValueError(
        f"--train_bias all cannot train the bias of a {type(base).__name__}; "
        "use lora_only, or name the module in --modules_to_save"
    )


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
