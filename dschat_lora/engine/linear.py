"""Linear layers whose weights ZeRO 3 may free between the forward and the backward pass."""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def free_between_passes(model: nn.Module) -> None:
    """Have every ``nn.Linear`` of ``model`` keep its weight as a parameter, not as a view of it.

    For the gradient of its input torch keeps ``W^T``, a view that holds the whole weight in memory
    until the backward pass, though ZeRO 3 has freed the parameter. DeepSpeed's
    ``memory_efficient_linear`` replaces torch's function in the whole process; this changes the
    layers of one model, and no value.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.linear(x, module.weight, module.bias)
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    output: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """``x W^T + b``; W is read anew in the backward pass, when DeepSpeed has gathered it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, weight.shape[0])
        return (
            (rows @ weight).view(*grad.shape[:-1], weight.shape[1]) if wants_x else None,
            rows.t() @ x.reshape(-1, weight.shape[1]) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
