"""Triton's side of :mod:`dschat_lora.kernels.rounding`."""

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["seed"])
def round_at_random_kernel(
    out,
    values,
    count,
    seed,
    DIGITS: tl.constexpr,
    LOWEST: tl.constexpr,
    STEP: tl.constexpr,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Values of 32 bits to numbers with fractions of so many digits."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(values + places, mask=inside, other=0.0)
    bits = _mixed(_mixed(places.to(tl.uint32)) ^ seed.to(tl.uint32)) >> (9 + DIGITS)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, LOWEST) * STEP
    rounded = tl.floor(tl.div_rn(x, step) + bits.to(tl.float32) * DRAWN) * step
    tl.store(out + places, rounded.to(out.dtype.element_ty), mask=inside)
