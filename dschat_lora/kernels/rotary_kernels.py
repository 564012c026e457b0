"""Triton's side of :mod:`dschat_lora.kernels.rotary`: some heads of one token a program."""

import triton
import triton.language as tl


@triton.jit
def _rotate(
    x,
    output,
    cos1,
    cos2,
    sin1,
    sin2,
    at,
    place,
    half,
    inside,
) -> None:
    """``(x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)`` of halves of vectors at offsets ``at``."""
    x1 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + at + half, mask=inside, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    tl.store(output + place, (x1 * cos1 - x2 * sin1).to(kind), mask=inside)
    tl.store(output + place + half, (x2 * cos2 + x1 * sin2).to(kind), mask=inside)


@triton.jit
def rotate_kernel(
    q,
    k,
    cos,
    sin,
    q_output,
    k_output,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    table_row,
    table_token,
    q_output_row,
    q_output_head,
    q_output_token,
    k_output_row,
    k_output_head,
    k_output_token,
    tokens,
    q_heads,
    k_heads,
    half,
    TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Heads of q, then those of k; the transpose of the rotation is its gradient."""
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    angle = row * table_row + token * table_token + column
    known = column < half
    cos1 = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + angle + half, mask=known, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + angle + half, mask=known, other=0.0).to(tl.float32)
    if TRANSPOSED:
        to_first, to_second = -sin2, -sin1
    else:
        to_first, to_second = sin1, sin2
    at = row * q_row + token * q_token + head * q_head + column
    place = row * q_output_row + token * q_output_token + head * q_output_head + column
    inside = known & (head < q_heads)
    _rotate(q, q_output, cos1, cos2, to_first, to_second, at, place, half, inside)
    head -= q_heads
    at = row * k_row + token * k_token + head * k_head + column
    place = row * k_output_row + token * k_output_token + head * k_output_head + column
    inside = known & (head >= 0) & (head < k_heads)
    _rotate(k, k_output, cos1, cos2, to_first, to_second, at, place, half, inside)
