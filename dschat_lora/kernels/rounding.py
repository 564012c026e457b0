"""Stochastic rounding of fp32 to 16 bits: up or down by chance, so that the mean is exact."""

import torch
from torch import Tensor

from dschat_lora.kernels.support import define, runs_kernels

# Bits of a fraction, and the exponent below which numbers have one distance; that of bfloat16 is
# one that fp32 has in full.
FORMATS = {torch.bfloat16: (7, -119), torch.float16: (10, -14)}
BLOCK = 1024  # elements of a program
_WORD, _EXPONENT = 2**32 - 1, 0x7F800000
_CHUNK = 2**20  # elements that torch rounds at a time, as it needs copies


def round_at_random(out: Tensor, values: Tensor, seed: int) -> None:
    """Fill ``out``, in 16 bits, with fp32 ``values``, each rounded to one of its two neighbours.

    It is that above with the probability of how far the value is above that below (section 2 of
    arXiv:1502.02551). The random bits are a function of the place and of ``seed``, in [0, 2^32).
    """
    assert out.is_contiguous()
    assert out.shape == values.shape
    rounding = round_rows_at_random if runs_kernels(out.device) else _plain
    rounding(out, values.contiguous(), seed)


def _plain(out: Tensor, values: Tensor, seed: int) -> None:
    digits, lowest = FORMATS[out.dtype]
    flat, target = values.view(-1), out.view(-1)
    for first in range(0, len(flat), _CHUNK):
        x = flat[first : first + _CHUNK]
        places = torch.arange(first, first + len(x), device=x.device)
        bits = _mixed(_mixed(places & _WORD) ^ seed) >> (9 + digits)
        power = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
        step = power.clamp(min=2.0**lowest) * 2.0**-digits  # to the next number
        drawn = bits.float() * 2.0 ** (digits - 23)
        target[first : first + len(x)] = (x / step + drawn).floor() * step


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits that changes half of them with each (prospector's lowbias32)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)


def _kernel(out: Tensor, values: Tensor, seed: int) -> None:
    from dschat_lora.kernels.rounding_kernels import round_at_random_kernel

    digits, lowest = FORMATS[out.dtype]
    count = out.numel()
    if count:
        scales = (2.0**lowest, 2.0**-digits, 2.0 ** (digits - 23))
        round_at_random_kernel[(-(-count // BLOCK),)](
            *(out, values, count, seed, digits), *scales, BLOCK
        )


# out and values of one shape, contiguous.
round_rows_at_random = define(
    "round_rows_at_random",
    _kernel,
    plain=_plain,
    writes=("out",),
    fake=lambda out, values, seed: None,
)
