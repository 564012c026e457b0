"""A base layer under several adapters in training: each has rows of its own in one batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.layers import (
    LoraLinear,
    conv1d,
    is_transposed,
    product_as,
    scaled_product,
    values_of,
)

# Rows of a part, one behind the other, and the adapter's layer; None where it has none here.
Part = tuple[int, LoraLinear | None]


class SharedLoraLinear(nn.Module):
    """``x -> x W^T + b + scaling_i * x A_i^T B_i^T`` with W frozen, i the adapter of the row.

    Each part is computed by the very products of its adapter's own layer, so that values and
    gradients are those that it has alone, to the bit where a product of some rows does not depend
    on what lies beside them in memory.

    Attributes:
        parts: of the next forward pass; they cover the rows of its input.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = base.get_parameter("weight"), base._parameters.get("bias")
        self.transposed = is_transposed(base)
        self.parts: Sequence[Part] = ()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out).

        Raises:
            ValueError: if the parts do not cover the rows, as where tokens are routed to experts.
        """
        rows = x.numel() // x.shape[-1]
        if sum(count for count, _ in self.parts) != rows:
            raise ValueError(f"a layer reads {rows} rows, and others are divided among adapters")
        factors = [f for _, own in self.parts if own is not None for f in own.factors()]
        parts = [(count, None if own is None else own.scaling) for count, own in self.parts]
        output: Tensor = _SharedLoraLinear.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self.transposed, parts, *factors
        )
        return output


class _SharedLoraLinear(torch.autograd.Function):
    """The operations of ``_LoraLinear``, for each part by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        parts: Sequence[tuple[int, float | None]],
        *factors: Tensor,
    ) -> Tensor:
        values = values_of(weight, x.dtype)
        rows, pairs = x.reshape(-1, x.shape[-1]), iter(factors)
        outputs, inners = [], []
        own_rows = torch.split(rows, [count for count, _ in parts])
        for own, (_, scaling) in zip(own_rows, parts, strict=True):
            if scaling is None:
                outputs.append((conv1d if transposed else F.linear)(own, values, bias))
                continue
            down, up = next(pairs), next(pairs)
            output = F.linear(own, values.t() if transposed else values, bias)
            inners.append(scaled_product(own, down.to(x.dtype).t(), scaling))
            outputs.append(output.addmm_(inners[-1], up.to(x.dtype).t()))
        ctx.save_for_backward(x, weight, *factors, *inners)
        ctx.transposed, ctx.parts, ctx.factors = transposed, parts, len(factors)
        whole = torch.cat(outputs)
        return whole.view(*x.shape[:-1], whole.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = ctx.saved_tensors
        pairs, inners = iter(rest[: ctx.factors]), iter(rest[ctx.factors :])
        counts = [count for count, _ in ctx.parts]
        all_rows = torch.split(x.reshape(-1, x.shape[-1]), counts)
        all_grads = torch.split(grad_output.reshape(-1, grad_output.shape[-1]), counts)
        values = values_of(weight, grad_output.dtype)
        matrix = values.t() if ctx.transposed else values
        grads_x, factor_grads = [], list[Tensor | None]()
        for rows, grad, (_, scaling) in zip(all_rows, all_grads, ctx.parts, strict=True):
            grad_x = grad @ matrix if ctx.needs_input_grad[0] else None
            if scaling is not None:
                down, up, inner = next(pairs), next(pairs), next(inners)
                grad_inner = scaled_product(grad, up.to(grad.dtype), scaling)
                if grad_x is not None:
                    grad_x.addmm_(grad_inner, down.to(grad.dtype))
                factor_grads.append(product_as(down.dtype, grad_inner.t(), rows))
                factor_grads.append(product_as(up.dtype, grad.t(), inner))
            grads_x.append(grad_x)
        whole = None
        if ctx.needs_input_grad[0]:
            whole = torch.cat([each for each in grads_x if each is not None]).view(x.shape)
        return whole, None, None, None, None, *factor_grads
