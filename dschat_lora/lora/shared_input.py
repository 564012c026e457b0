"""LoRA layers that read one input (q, k and v; gate and up) as one function.

Their A are one matrix: ``x [A_q; A_k; A_v]^T`` reads x once, as do the gradients of all A, and the
gradient of x is summed where the products make it. Outputs and parameters stay those of each layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.kernels.support import runs_kernels
from dschat_lora.lora.autograd import Context
from dschat_lora.lora.layers import (
    LoraLinear,
    active_bias,
    lora_linear_reference,
    product_as,
    scaled_product,
    values_of,
)

READ_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def layers_of_one_input(model: nn.Module) -> Iterator[list[LoraLinear]]:
    """Adapted layers in use, of one scaling, that as a rule read one input; whole ones."""
    for module in model.modules():
        for names in READ_ONE_INPUT:
            layers = [module._modules.get(name) for name in names]
            adapted = [each for each in layers if isinstance(each, LoraLinear) and each.enabled]
            alike = all(getattr(each, "split", None) is None for each in adapted)
            if len(adapted) == len(names) and alike and len({e.scaling for e in adapted}) == 1:
                yield adapted


class SharedInput:
    """Layers of one input while their casts are in use: the first one called computes all.

    Args:
        layers: of :func:`layers_of_one_input`, which :func:`takes` these.
        down: (r, in), their A one after another in the type of the computation.
    """

    def __init__(self, layers: Sequence[LoraLinear], down: Tensor) -> None:
        self._layers, self._down = list(layers), down
        self._input: Tensor | None = None
        self._version = 0
        self._outputs: dict[int, Tensor] = {}  # those not yet read, by number of their layer

    def read(self, layer: LoraLinear, x: Tensor) -> Tensor | None:
        """(..., out) of one of the layers; None where it is to compute by itself."""
        if not self._applies(x):
            return None
        number = self._layers.index(layer)
        same = x is self._input and x._version == self._version
        if not same or number not in self._outputs:
            self.forget()
            self._outputs = dict(enumerate(self._compute(x)))
            self._input, self._version = x, x._version
        output = self._outputs.pop(number)
        if not self._outputs:
            self.forget()
        return output

    def forget(self) -> None:
        """Hold no input and no outputs."""
        self._input, self._outputs = None, {}

    def _applies(self, x: Tensor) -> bool:
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        autocast = torch.is_autocast_enabled(x.device.type)
        typed = x.dtype == self._down.dtype and not autocast and torch.is_grad_enabled()
        return typed and not any((e.dropout and e.training) or not e.enabled for e in self._layers)

    def _compute(self, x: Tensor) -> tuple[Tensor, ...]:
        layers = self._layers
        ups = [layer.casts[1] for layer in layers if layer.casts is not None]
        outputs: tuple[Tensor, ...] = _LorasOfOneInput.apply(  # type: ignore[no-untyped-call]
            x,
            self._down,
            layers[0].scaling,
            len(layers),
            *[layer.weight for layer in layers],
            *[active_bias(layer) for layer in layers],
            *[layer.lora_A for layer in layers],
            *[layer.lora_B for layer in layers],
            *ups,
        )
        return outputs


def takes(layers: Sequence[LoraLinear]) -> bool:
    """Whether layers of one input, with frozen weights, are computed together on their device."""
    return all(
        type(layer) is LoraLinear
        and not (layer.transposed or layer.weight.requires_grad)
        and runs_kernels(layer.weight.device)
        for layer in layers
    )


class _LorasOfOneInput(torch.autograd.Function):
    """As :func:`~dschat_lora.lora.layers.lora_linear` of each layer, in fewer products.

    Arguments after the number n of layers are n weights, biases, A, B, and B as they are cast.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, down: Tensor, scaling: float, n: int, *each: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases, firsts, seconds, ups = _parts(each, n)
        rows = x.reshape(-1, x.shape[-1])
        inner = scaled_product(rows, down.t(), scaling)
        ctx.ranks = [len(first) for first in firsts]
        outputs = []
        for weight, bias, up, own in zip(
            weights, biases, ups, torch.split(inner, ctx.ranks, 1), strict=True
        ):
            output = F.linear(rows, values_of(weight, x.dtype), bias).addmm_(own, up.t())
            outputs.append(torch.ops.aten._unsafe_view(output, [*x.shape[:-1], len(up)]))
        ctx.save_for_backward(x, down, inner, *weights, *firsts, *seconds, *ups)
        ctx.scaling, ctx.n = scaling, n
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Context, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, down, inner, *each = ctx.saved_tensors
        n = ctx.n
        weights, firsts, seconds, ups = _parts(each, n)
        wants_x = ctx.needs_input_grad[0]
        of_bias, of_a, of_b = (ctx.needs_input_grad[4 + i * n :][:n] for i in (1, 2, 3))
        if torch.is_grad_enabled():  # they are to be differentiated themselves
            return _graph_of_gradients(ctx, grad_outputs, x, weights, firsts, seconds)
        rows = x.reshape(-1, x.shape[-1])
        grad_inner, grad_x = torch.empty_like(inner), None
        parts = zip(*(torch.split(y, ctx.ranks, 1) for y in (grad_inner, inner)), strict=True)
        grads: list[list[Tensor | None]] = [[None] * n for _ in range(5)]
        for i, (own_grad, own) in enumerate(parts):
            grad = grad_outputs[i]
            if grad is None:
                own_grad.zero_()
                continue
            grad = grad.reshape(-1, grad.shape[-1])
            own_grad.addmm_(grad, ups[i], beta=0, alpha=ctx.scaling)
            if wants_x:
                values = values_of(weights[i], grad.dtype)
                grad_x = grad @ values if grad_x is None else grad_x.addmm_(grad, values)
                del values
            grads[1][i] = grad.sum(0) if of_bias[i] else None
            grads[3][i] = product_as(seconds[i].dtype, grad.t(), own) if of_b[i] else None
        if grad_x is not None:
            grad_x = grad_x.addmm_(grad_inner, down).view(x.shape)
        if any(of_a):
            grads[2] = [*torch.split(product_as(firsts[0].dtype, grad_inner.t(), rows), ctx.ranks)]
        return grad_x, None, None, None, *[gradient for kind in grads for gradient in kind]


def _parts(each: Sequence[Any], n: int) -> list[Sequence[Any]]:
    """What is given of each of n layers, kind by kind."""
    return [each[first : first + n] for first in range(0, len(each), n)]


def _graph_of_gradients(
    ctx: Context,
    grad_outputs: Sequence[Tensor | None],
    x: Tensor,
    weights: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """The gradients by torch's own operations, which have derivatives."""
    n = len(weights)
    values = [values_of(weight, x.dtype) for weight in weights]
    factors = zip(values, firsts, seconds, strict=True)
    outputs = [lora_linear_reference(x, w, None, a, b, ctx.scaling) for w, a, b in factors]
    inputs = dict(enumerate([x, *[None] * (3 + 2 * n), *firsts, *seconds, *[None] * n]))
    chosen = {i: y for i, y in inputs.items() if y is not None and ctx.needs_input_grad[i]}
    used = [(y, g) for y, g in zip(outputs, grad_outputs, strict=True) if g is not None]
    wanted = torch.autograd.grad(
        [y for y, _ in used],
        [*chosen.values()],
        [g for _, g in used],
        create_graph=True,
        allow_unused=True,
    )
    gradients: list[Tensor | None] = [None] * len(inputs)
    for i, gradient in zip(chosen, wanted, strict=True):
        gradients[i] = gradient
    for i, grad in enumerate(grad_outputs):
        if grad is not None and ctx.needs_input_grad[4 + n + i]:
            gradients[4 + n + i] = grad.reshape(-1, grad.shape[-1]).sum(0)
    return tuple(gradients)
