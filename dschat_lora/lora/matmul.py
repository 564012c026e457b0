"""A frozen matrix product and its low-rank update as one operation.

``y = x W^T + b + s (x A^T) B^T`` written out in torch makes four tensors as large as ``y`` (the
base's product, the update, the scaled update, their sum) and keeps 16-bit copies of fp32
factors. :func:`lora_linear` makes one, and keeps what the factors' gradients need: ``x``,
shared with every other layer that reads it, and ``x A^T``, which is r wide.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.lora.nf4 import NF4State, dequantize, state_of, values_of


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,  # noqa: N803
    lora_B: Tensor,  # noqa: N803
    scaling: float,
    keep: Tensor | None = None,
) -> Tensor:
    """What :func:`lora_linear` computes, as the formula reads (arXiv:2106.09685, eq. 3)."""
    adapted = x if keep is None else x * keep
    update = F.linear(F.linear(adapted, lora_A.to(x.dtype)), lora_B.to(x.dtype))
    return F.linear(x, weight, bias) + scaling * update


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,  # noqa: N803
    lora_B: Tensor,  # noqa: N803
    scaling: float,
    keep: Tensor | None = None,
    *,
    transposed: bool = False,
    casts: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``x W^T + b + scaling * ((x * keep) A^T) B^T`` for a frozen W.

    Under autocast all of it is computed in autocast's type, else in that of ``x``.

    Args:
        x: (..., in).
        weight: (out, in), frozen as a rule. May be a ZeRO 3 parameter: it is read anew in the
            backward pass, when DeepSpeed has gathered it again. A quantised one is unpacked in
            both passes.
        bias: (out,) or None.
        lora_A: (r, in), any float type.
        lora_B: (out, r), any float type.
        scaling: of the update; with dropout it includes the factor ``1 / (1 - p)``.
        keep: (..., in) bool, True where dropout keeps the input of the adapter; None: everywhere.
        transposed: ``weight`` is (in, out), as in GPT-2's layers.
        casts: ``lora_A`` and ``lora_B`` in the type of the computation; cast here if absent.

    Returns:
        (..., out).
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        values = values_of(weight, x.dtype)
        matrix = values.t() if transposed else values
        return lora_linear_reference(x, matrix, bias, lora_A, lora_B, scaling, keep)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    state = state_of(weight)
    return _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x.to(dtype),
        weight if state is not None else weight.to(dtype),
        None if bias is None else bias.to(dtype),
        lora_A,
        lora_B,
        scaling,
        keep,
        transposed,
        *(casts or (None, None)),
        state,
    )


def adapter_dropout(
    x: Tensor, scaling: float, dropout: float, features: int | None = None
) -> tuple[float, Tensor | None]:
    """``scaling`` and ``keep`` for :func:`lora_linear` under dropout of the adapter's input."""
    if dropout == 0:
        return scaling, None
    return scaling / (1 - dropout), draw_keep(x, dropout, features)


def draw_keep(x: Tensor, dropout: float, features: int | None = None) -> Tensor:
    """(..., features) bool, by default (..., in), True with probability ``1 - dropout``."""
    shape = (*x.shape[:-1], x.shape[-1] if features is None else features)
    # Not by bernoulli_(), of which inductor of torch 2.13 makes something else.
    return torch.rand(shape, device=x.device) >= dropout


class _LoraLinear(torch.autograd.Function):
    """Products of matrices: the leading dimensions of ``x`` are one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_A: Tensor,  # noqa: N803
        lora_B: Tensor,  # noqa: N803
        scaling: float,
        keep: Tensor | None,
        transposed: bool,
        down: Tensor | None,
        up: Tensor | None,
        state: NF4State | None,
    ) -> Tensor:
        # The parameters themselves are kept: casts are made again, and shards gathered again.
        down, up = (lora_A if down is None else down), (lora_B if up is None else up)
        rows = x.reshape(-1, x.shape[-1])
        values = weight if state is None else dequantize(weight.detach(), state, x.dtype)
        output = F.linear(rows, values.t() if transposed else values, bias)
        del values
        adapted = rows if keep is None else rows * keep.reshape(rows.shape)
        inner = F.linear(adapted, down.to(x.dtype))
        output.addmm_(inner, up.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(x, weight, lora_A, lora_B, down, up, keep, inner)
        ctx.scaling, ctx.transposed, ctx.state = scaling, transposed, state
        ctx.types = lora_A.dtype, lora_B.dtype
        # No view of what nothing else holds: some models write into it (Falcon, OLMo).
        shape = [*x.shape[:-1], output.shape[-1]]
        return torch.ops.aten._unsafe_view(output, shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_A, lora_B, down, up, keep, inner = ctx.saved_tensors  # noqa: N806
        if torch.is_grad_enabled():  # they are to be differentiated themselves
            return _graph_of_gradients(ctx, grad_output, x, weight, lora_A, lora_B, keep)
        wants_x, wants_weight, wants_bias, wants_a, wants_b = ctx.needs_input_grad[:5]
        rows, grad = x.reshape(-1, x.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])
        if keep is not None:
            keep = keep.reshape(rows.shape)
        grad_inner = (grad @ up.to(grad.dtype)).mul_(ctx.scaling)
        grad_x = grad_a = grad_b = None
        if wants_x:
            # Unpacked again: kept, the values would take the room that four bits save.
            values = weight if ctx.state is None else dequantize(weight, ctx.state, grad.dtype)
            grad_x = grad @ (values.t() if ctx.transposed else values)
            del values
            if keep is None:
                grad_x.addmm_(grad_inner, down.to(grad.dtype))
            else:
                grad_x.add_((grad_inner @ down.to(grad.dtype)).mul_(keep))
            grad_x = grad_x.view(x.shape)
        if wants_a:
            adapted = rows if keep is None else rows * keep
            grad_a = (grad_inner.t() @ adapted).to(ctx.types[0])
        if wants_b:
            grad_b = (grad.t() @ inner).mul_(ctx.scaling).to(ctx.types[1])
        grad_bias = grad.sum(0) if wants_bias else None
        grad_matrix = grad.t() @ rows if wants_weight else None
        if grad_matrix is not None and ctx.transposed:
            grad_matrix = grad_matrix.t()
        return grad_x, grad_matrix, grad_bias, grad_a, grad_b, *[None] * 6


def _graph_of_gradients(
    ctx: Any,
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,  # noqa: N803
    lora_B: Tensor,  # noqa: N803
    keep: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of :class:`_LoraLinear` by torch's own operations, which have derivatives."""
    values = weight if ctx.state is None else dequantize(weight, ctx.state, x.dtype)
    matrix = values.t() if ctx.transposed else values
    output = lora_linear_reference(x, matrix, None, lora_A, lora_B, ctx.scaling, keep)
    inputs = {0: x, 1: weight, 3: lora_A, 4: lora_B}
    chosen = {i: each for i, each in inputs.items() if ctx.needs_input_grad[i]}
    gradients: list[Tensor | None] = [None] * 11
    if chosen:
        found = torch.autograd.grad(output, [*chosen.values()], grad_output, create_graph=True)
        for i, gradient in zip(chosen, found, strict=True):
            gradients[i] = gradient
    if ctx.needs_input_grad[2]:
        gradients[2] = grad_output.reshape(-1, grad_output.shape[-1]).sum(0)
    return tuple(gradients)
