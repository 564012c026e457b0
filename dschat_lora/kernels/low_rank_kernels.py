"""Triton's side of :mod:`dschat_lora.kernels.low_rank`: a tile of one layer's outputs a program."""

import triton
import triton.language as tl


@triton.jit
def low_rank_tile(
    inner,  # of the first row, at the layer's part of the products with first factors
    inner_step,
    up,  # of the layer's first output
    up_step,
    rows,
    in_rows,
    columns,
    in_columns,
    total,  # (rows, columns) of zeros
    RANK: tl.constexpr,
    STEP: tl.constexpr,
):
    """``inner up^T`` of some rows and columns, in fp32."""
    for first in range(0, RANK, STEP):
        k = first + tl.arange(0, STEP)
        left = tl.load(
            inner + rows[:, None] * inner_step + k[None, :],
            mask=in_rows[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        right = tl.load(
            up + columns[None, :] * up_step + k[:, None],
            mask=in_columns[None, :] & (k < RANK)[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def add_kernel(
    products,
    residual,
    output,
    up,
    products_step,
    output_step,  # of the residual too
    up_step,
    count,
    first_size,
    second_size,
    third_size,
    scaling,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Products with the updates of up to three layers, and a residual or a ReLU."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = rows < count
    # The layer whose outputs this tile is of, by the tiles that layers before it take.
    first_tiles, second_tiles = tl.cdiv(first_size, WIDTH), tl.cdiv(second_size, WIDTH)
    tile = tl.program_id(1)
    layer = (tile >= first_tiles).to(tl.int32) + (tile >= first_tiles + second_tiles).to(tl.int32)
    size = tl.where(layer == 0, first_size, tl.where(layer == 1, second_size, third_size))
    begin = tl.where(layer == 0, 0, tl.where(layer == 1, first_size, first_size + second_size))
    before = tl.where(layer == 0, 0, tl.where(layer == 1, first_tiles, first_tiles + second_tiles))
    own = (tile - before) * WIDTH + tl.arange(0, WIDTH)
    in_columns, columns = own < size, (begin + own).to(tl.int64)
    mask = in_rows[:, None] & in_columns[None, :]
    x = tl.load(products + rows[:, None] * products_step + columns[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if RANK:
        inner = products + first_size + second_size + third_size + layer * RANK
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        x += scaling * low_rank_tile(
            inner, products_step, up, up_step, rows, in_rows, columns, in_columns, total, RANK, STEP
        )
    place = rows[:, None] * output_step + columns[None, :]
    if RESIDUAL:
        x += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        x = tl.where(x < 0, 0.0, x)  # which keeps NaN
    tl.store(output + place, x.to(output.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_update_kernel(
    products,
    output,
    up,
    products_step,
    up_step,
    count,
    size,
    scaling,
    RANK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """``silu(gate) * x`` of two layers with their updates."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = rows < count
    columns = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    in_columns = columns < size
    mask = in_rows[:, None] & in_columns[None, :]
    place = products + rows[:, None] * products_step + columns[None, :]
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(place + size, mask=mask, other=0.0).to(tl.float32)
    if RANK:
        inner, total = products + 2 * size, tl.zeros((ROWS, WIDTH), tl.float32)
        gate += scaling * low_rank_tile(
            inner, products_step, up, up_step, rows, in_rows, columns, in_columns, total, RANK, STEP
        )
        x += scaling * low_rank_tile(
            inner + RANK,
            products_step,
            up + size.to(tl.int64) * up_step,
            up_step,
            rows,
            in_rows,
            columns,
            in_columns,
            total,
            RANK,
            STEP,
        )
    y = gate * tl.sigmoid(gate) * x
    tl.store(
        output + rows[:, None] * size + columns[None, :], y.to(output.dtype.element_ty), mask=mask
    )
