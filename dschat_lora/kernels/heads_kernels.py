"""Triton's side of :mod:`dschat_lora.kernels.heads`: one head of some rows a program."""

import triton
import triton.language as tl

from dschat_lora.kernels.low_rank_kernels import low_rank_tile


@triton.jit
def updated(
    source,  # of the first row, at the head
    source_step,
    inner,
    inner_step,
    up,
    up_step,
    scaling,
    rows,
    in_rows,
    columns,
    in_columns,
    HALF: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Both halves of a head of some rows in fp32, with their updates."""
    mask = in_rows[:, None] & in_columns[None, :]
    place = rows[:, None] * source_step + columns[None, :]
    first = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + place, mask=mask, other=0.0).to(tl.float32)
    if RANK:
        total = tl.zeros_like(first)
        first += scaling * low_rank_tile(
            inner, inner_step, up, up_step, rows, in_rows, columns, in_columns, total, RANK, STEP
        )
        up += HALF * up_step
        second += scaling * low_rank_tile(
            inner, inner_step, up, up_step, rows, in_rows, columns, in_columns, total, RANK, STEP
        )
    return first, second


@triton.jit
def normed(first, second, norm, columns, in_columns, eps, HALF: tl.constexpr):
    """Both halves over their root mean square, times the weights."""
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = 1 / tl.sqrt(square / (2 * HALF) + eps)
    weights = tl.load(norm + columns, mask=in_columns, other=0.0).to(tl.float32)
    first = first * scale[:, None] * weights[None, :]
    weights = tl.load(norm + HALF + columns, mask=in_columns, other=0.0).to(tl.float32)
    return first, second * scale[:, None] * weights[None, :]


@triton.jit
def rotated(first, second, cos, sin, step, rows, columns, mask, HALF: tl.constexpr):
    """Both halves, rotated by the angles of their rows."""
    place = rows[:, None] * step + columns[None, :]
    x = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32) * first
    y = tl.load(cos + HALF + place, mask=mask, other=0.0).to(tl.float32) * second
    x -= tl.load(sin + place, mask=mask, other=0.0).to(tl.float32) * second
    y += tl.load(sin + HALF + place, mask=mask, other=0.0).to(tl.float32) * first
    return x, y


@triton.jit
def heads_kernel(
    query,
    key,
    value,
    inner,
    up,
    cos,
    sin,
    query_norm,
    key_norm,
    keys,
    values,
    stored_columns,
    query_step,
    key_step,
    value_step,
    inner_step,
    up_step,
    angle_step,
    store_row,
    store_head,
    store_column,
    column_step,
    count,
    heads,
    key_heads,
    scaling,
    eps,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
) -> None:
    """A query's head in place, or one of keys or values into the cache."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head, columns = tl.program_id(1), tl.arange(0, WIDTH)
    in_rows, in_columns = rows < count, columns < HALF
    mask = in_rows[:, None] & in_columns[None, :]
    # 0 for queries, 1 for keys, 2 for values; the head among its own.
    kind = (head >= heads).to(tl.int32) + (head >= heads + key_heads).to(tl.int32)
    own = head - tl.where(kind == 0, 0, tl.where(kind == 1, heads, heads + key_heads))
    source, step, norm, target = query, query_step, query_norm, query
    place = rows * query_step + own * (2 * HALF)
    if kind > 0:
        column = tl.load(stored_columns + rows * column_step, mask=in_rows, other=0)
        place = rows * store_row + own.to(tl.int64) * store_head + column * store_column
        source, step, norm, target = key, key_step, key_norm, keys
    if kind == 2:
        source, step, target = value, value_step, values
    source += own * (2 * HALF)
    up += head.to(tl.int64) * (2 * HALF) * up_step
    inner += kind * RANK
    # fmt: off
    first, second = updated(
        source, step, inner, inner_step, up, up_step, scaling, rows, in_rows, columns, in_columns,
        HALF, RANK, STEP,
    )
    # fmt: on
    if kind < 2:
        if NORMS:
            first, second = normed(first, second, norm, columns, in_columns, eps, HALF)
        if ROTATES:
            first, second = rotated(first, second, cos, sin, angle_step, rows, columns, mask, HALF)
    target += place[:, None] + columns[None, :]
    tl.store(target, first.to(query.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(query.dtype.element_ty), mask=mask)
