"""Triton's side of :mod:`dschat_lora.kernels.heads`: one head of some rows a program."""

import triton
import triton.language as tl

from dschat_lora.kernels.low_rank_kernels import low_rank_tile


@triton.jit
def half_head(
    source,  # of the first row, at the half
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Half of a head of some rows in fp32, with its update."""
    mask = in_rows[:, None] & in_columns[None, :]
    place = rows[:, None] * source_step + columns[None, :]
    x = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
    if RANK:
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        x += scaling * low_rank_tile(
            inner, inner_step, up, up_step, rows, in_rows, columns, in_columns, total, RANK, STEP
        )
    return x


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
def rotated(first, second, cos, cos_step, sin, sin_step, rows, columns, mask, HALF: tl.constexpr):
    """Both halves, rotated by the angles of their rows."""
    place = rows[:, None] * cos_step + columns[None, :]
    x = tl.load(cos + place, mask=mask, other=0.0).to(tl.float32) * first
    y = tl.load(cos + HALF + place, mask=mask, other=0.0).to(tl.float32) * second
    place = rows[:, None] * sin_step + columns[None, :]
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
    cos_step,
    sin_step,
    keys_row,
    keys_head,
    keys_column,
    values_row,
    values_head,
    values_column,
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
    in_rows = rows < count
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    in_columns = columns < HALF
    mask = in_rows[:, None] & in_columns[None, :]
    column = tl.load(stored_columns + rows * column_step, mask=in_rows, other=0)
    # 0 for queries, 1 for keys, 2 for values; the head among its own.
    kind = (head >= heads).to(tl.int32) + (head >= heads + key_heads).to(tl.int32)
    own = head - tl.where(kind == 0, 0, tl.where(kind == 1, heads, heads + key_heads))
    source, step, norm = query, query_step, query_norm
    target, place = query + own * (2 * HALF), rows * query_step
    if kind == 1:
        source, step, norm = key, key_step, key_norm
        target = keys + own.to(tl.int64) * keys_head
        place = rows * keys_row + column * keys_column
    if kind == 2:
        source, step = value, value_step
        target = values + own.to(tl.int64) * values_head
        place = rows * values_row + column * values_column
    source += own * (2 * HALF)
    up += head.to(tl.int64) * (2 * HALF) * up_step
    inner += kind * RANK
    first = half_head(
        source,
        step,
        inner,
        inner_step,
        up,
        up_step,
        scaling,
        rows,
        in_rows,
        columns,
        in_columns,
        ROWS,
        WIDTH,
        RANK,
        STEP,
    )
    second = half_head(
        source + HALF,
        step,
        inner,
        inner_step,
        up + HALF * up_step,
        up_step,
        scaling,
        rows,
        in_rows,
        columns,
        in_columns,
        ROWS,
        WIDTH,
        RANK,
        STEP,
    )
    if kind < 2:
        if NORMS:
            first, second = normed(first, second, norm, columns, in_columns, eps, HALF)
        if ROTATES:
            first, second = rotated(
                first, second, cos, cos_step, sin, sin_step, rows, columns, mask, HALF
            )
    target += place[:, None] + columns[None, :]
    tl.store(target, first.to(query.dtype.element_ty), mask=mask)
    tl.store(target + HALF, second.to(query.dtype.element_ty), mask=mask)
