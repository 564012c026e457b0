"""Rotary position embeddings (arXiv:2104.09864, eq. 34) of queries and keys in one kernel.

``rotate(q, k, cos, sin, transposed)`` turns (B, heads, T, D) ``q`` and (B, key heads, T, D) ``k``
by angles of (B, T, D) or (1, T, D) ``cos`` and ``sin``: halves x1 and x2 of a head's vector become
``x1 cos - x2 sin`` and ``x2 cos + x1 sin``. ``transposed`` gives the gradients: the other way
round, each half by the sines of the other. Results lie in memory as what they are made of.
"""

import torch
from torch import Tensor

from dschat_lora.kernels.support import define, next_power_of_2

_HEADS = 8  # of a program


def _kernel(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    from dschat_lora.kernels.rotary_kernels import rotate_kernel

    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    outputs = torch.empty_like(q), torch.empty_like(k)
    rows, q_heads, tokens, size = q.shape
    k_heads, half = k.shape[1], size // 2
    table = (0 if len(cos) == 1 else cos.stride(0), cos.stride(1))
    steps = (*q.stride()[:3], *k.stride()[:3], *table)
    steps += (*outputs[0].stride()[:3], *outputs[1].stride()[:3])
    if rows * tokens:
        rotate_kernel[rows * tokens, -(-(q_heads + k_heads) // _HEADS)](
            *(q, k, cos, sin, *outputs),
            *steps,
            *(tokens, q_heads, k_heads, half),
            TRANSPOSED=transposed,
            HEADS=_HEADS,
            HALF=next_power_of_2(half),
        )
    return outputs


def rotate_plain(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    """By torch's operations, three for each of both."""
    cos, (first, second) = cos.unsqueeze(1), sin.unsqueeze(1).chunk(2, -1)
    to_first, to_second = (second, first) if transposed else (first, second)
    outputs = q * cos, k * cos
    for x, output in zip((q, k), outputs, strict=True):
        (x1, x2), (y1, y2) = x.chunk(2, -1), output.chunk(2, -1)
        y1.addcmul_(x2, to_first, value=1 if transposed else -1)
        y2.addcmul_(x1, to_second, value=-1 if transposed else 1)
    return outputs


rotate = define("rotate", _kernel, plain=rotate_plain)
