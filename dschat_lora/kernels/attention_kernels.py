"""Attention of one token to a row's own columns, as Triton compiles it."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(2**30)  # a column that no cache has


@triton.jit
def attend_columns(
    query,
    key,
    value,
    first,
    own,
    last,
    tiles,
    parts,
    sums,
    query_row,
    query_head,
    store_row,
    store_head,
    store_column,
    last_row,
    scale,
    window,
    tile_programs,
    ROW_SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One split of the columns that a row reads by itself, or of those that rows of a tile share.

    The first ``tile_programs`` programs are of tiles. Each is of one key head, and of the ``HEADS``
    heads of queries that have it in common.
    """
    program = tl.program_id(0) - tile_programs
    # fmt: off
    if program >= 0:
        _attend_split(
            query, key, value, first, own, last, tiles, parts, sums, query_row, query_head,
            store_row, store_head, store_column, last_row, scale, window, program, ROW_SPLITS,
            0, ROW_SPLITS + TILE_SPLITS, 1, HEADS, PADDED_HEADS, SIZE, PADDED_SIZE, COLUMNS, False,
        )
    elif TILE_SPLITS > 0:
        _attend_split(
            query, key, value, first, own, last, tiles, parts, sums, query_row, query_head,
            store_row, store_head, store_column, last_row, scale, window, tl.program_id(0),
            TILE_SPLITS, ROW_SPLITS, ROW_SPLITS + TILE_SPLITS, COPIES, HEADS, PADDED_HEADS, SIZE,
            PADDED_SIZE, COLUMNS, True,
        )
    # fmt: on


@triton.jit
def _attend_split(
    query,
    key,
    value,
    first,
    own,
    last,
    tiles,
    parts,
    sums,
    query_row,
    query_head,
    store_row,
    store_head,
    store_column,
    last_row,
    scale,
    window,
    program,
    SPLITS: tl.constexpr,
    FIRST_PART: tl.constexpr,
    PARTS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
):
    index, split, key_head = program // SPLITS, program % SPLITS, tl.program_id(1).to(tl.int64)
    # Queries are the heads of each of the rows; tensor cores take sixteen at least.
    count: tl.constexpr = COPIES * PADDED_HEADS if COPIES * PADDED_HEADS > 16 else 16
    number, sizes = tl.arange(0, count), tl.arange(0, PADDED_SIZE)
    head, copy = number % PADDED_HEADS, number // PADDED_HEADS
    if SHARED:
        row = tl.load(tiles + index * COPIES + copy, mask=copy < COPIES, other=-1)
    else:
        row = tl.where(copy == 0, index, -1).to(tl.int64)
    there = (row >= 0) & (head < HEADS)
    begin, end = _bounds(first, own, last, last_row, window, row, there, SHARED)
    # Of what any of the rows sees, each split has as many columns.
    start, stop = tl.min(begin), tl.max(end)
    length = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), SPLITS), COLUMNS) * COLUMNS
    start += split * length
    stop = tl.minimum(stop, start + length)

    mask = there[:, None] & (sizes < SIZE)[None, :]
    heads = query + row * query_row + (key_head * HEADS + head) * query_head
    q = tl.load(heads[:, None] + sizes[None, :], mask=mask, other=0.0)
    # Any row of a tile has the columns that they share.
    place = tl.max(row) * store_row + key_head * store_head + start.to(tl.int64) * store_column
    # fmt: off
    output, highest, total = _read(
        q, key + place, value + place, store_column, scale, start, stop, begin, end,
        count, SIZE, PADDED_SIZE, COLUMNS,
    )
    # fmt: on
    divisor = tl.where(total > 0, total, 1.0)
    target = (row * tl.num_programs(1) * HEADS + key_head * HEADS + head) * PARTS
    target += FIRST_PART + split
    if PARTS > 1:
        tl.store(sums + target, highest + tl.log2(divisor), mask=there)
        mask &= (total > 0)[:, None]  # of a part without columns nothing but the sum is read
    result = (output / divisor[:, None]).to(parts.dtype.element_ty)
    tl.store(parts + target[:, None] * SIZE + sizes[None, :], result, mask=mask)


@triton.jit
def _bounds(first, own, last, last_row, window, row, there, SHARED: tl.constexpr):
    """The first column that each query sees here, and the one behind its last."""
    begin = tl.load(first + row, mask=there, other=NOWHERE).to(tl.int32)
    behind = tl.load(own + row, mask=there, other=0).to(tl.int32)
    end = tl.load(last + row * last_row, mask=there, other=-1).to(tl.int32) + 1
    begin = tl.maximum(begin, end - window)
    if SHARED:
        end = tl.minimum(end, behind)
    else:
        begin = tl.maximum(begin, behind)
    return begin, end


@triton.jit
def _read(
    q,
    key,
    value,
    store_column,
    scale,
    start,
    stop,
    begin,
    end,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Weighted values of columns, the largest score of each query, and the sum of its weights.

    Scores are in units of log 2, weights relative to that of the largest (arXiv:2205.14135).
    """
    sizes, columns = tl.arange(0, PADDED_SIZE), tl.arange(0, COLUMNS)
    place = columns[:, None].to(tl.int64) * store_column + sizes[None, :]
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, PADDED_SIZE], tl.float32)
    for column in range(start, stop, COLUMNS):
        at = column + columns
        mask = (at < stop)[:, None] & (sizes < SIZE)[None, :]
        k = tl.load(key + place, mask=mask, other=0.0)
        v = tl.load(value + place, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        seen = (at[None, :] >= begin[:, None]) & (at[None, :] < tl.minimum(end, stop)[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(highest - base)
        total = total * kept + tl.sum(weights, 1)
        output = tl.dot(weights.to(v.dtype), v, output * kept[:, None], input_precision="ieee")
        highest = higher
        place += COLUMNS * store_column
    return output, highest, total


@triton.jit
def combine_parts(
    parts,
    sums,
    first,
    own,
    output,
    heads,
    ROW_SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
) -> None:
    """The parts of one head of a row, weighted by their sums of exponentials."""
    head = tl.program_id(0).to(tl.int64)
    row = head // heads
    number, sizes = tl.arange(0, PADDED_PARTS), tl.arange(0, PADDED_SIZE)
    shares = tl.load(first + row) < tl.load(own + row)
    there = (number < ROW_SPLITS) | (shares & (number < PARTS))
    logs = tl.load(sums + head * PARTS + number, mask=there, other=-float("inf"))
    highest = tl.max(logs)
    weights = tl.exp2(logs - tl.where(highest == -float("inf"), 0.0, highest))
    mask = (weights > 0)[:, None] & (sizes < SIZE)[None, :]
    place = (head * PARTS + number)[:, None] * SIZE + sizes[None, :]
    values = tl.load(parts + place, mask=mask, other=0.0)
    total = tl.sum(weights)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    result = result.to(output.dtype.element_ty)
    tl.store(output + head * SIZE + sizes, result, mask=sizes < SIZE)
