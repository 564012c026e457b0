"""SwiGLU (arXiv:2002.05202, eq. 5) and its gradients, each in one kernel.

``swiglu(gate, x)`` is ``silu(gate) * x`` of (N, F) tensors of one type, in fp32 and rounded once.
``swiglu_backward(grad, gate, x, product)`` returns the gradients of ``gate`` and ``x``, and writes
``silu(gate) * x`` into ``product``, which may be ``grad`` itself, where one is given.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.kernels.support import define

_BLOCK = 1024


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _forward(gate: Tensor, x: Tensor) -> Tensor:
    from dschat_lora.kernels.swiglu_kernels import swiglu_kernel

    output = _empty(x)
    _launch(swiglu_kernel, (gate, x), (output,))
    return output


def _backward(
    grad: Tensor, gate: Tensor, x: Tensor, product: Tensor | None
) -> tuple[Tensor, Tensor]:
    from dschat_lora.kernels.swiglu_kernels import swiglu_backward_kernel

    made = _empty(gate), _empty(x)
    place = made[0] if product is None else product  # another is not written to
    assert place.stride(1) == 1
    options = {"WRITES_PRODUCT": product is not None}
    _launch(swiglu_backward_kernel, (grad, gate, x), (*made, place), **options)
    return made


def _launch(
    kernel: Any, read: tuple[Tensor, ...], written: tuple[Tensor, ...], **options: object
) -> None:
    rows, features = read[0].shape
    read = tuple(each if each.stride(1) == 1 else each.contiguous() for each in read)
    steps = (each.stride(0) for each in (*read, *written))
    if rows:
        grid = (rows, -(-features // _BLOCK))
        kernel[grid](*read, *written, *steps, features, BLOCK=_BLOCK, **options)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _plain(gate: Tensor, x: Tensor) -> Tensor:
    return (F.silu(_wide(gate)) * _wide(x)).to(x.dtype)


def _plain_backward(
    grad: Tensor, gate: Tensor, x: Tensor, product: Tensor | None
) -> tuple[Tensor, Tensor]:
    g, z, factor = map(_wide, (grad, gate, x))
    sigmoid = z.sigmoid()
    silu = z * sigmoid
    made = (g * factor * sigmoid * (1 + z * (1 - sigmoid))).to(gate.dtype), (g * silu).to(x.dtype)
    if product is not None:
        product.copy_(silu * factor)
    return made


swiglu = define("swiglu", _forward, plain=_plain, fake=lambda gate, x: _empty(x))
swiglu_backward = define("swiglu_backward", _backward, plain=_plain_backward, writes=("product",))
