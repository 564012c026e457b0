"""Attention of one token to the columns of a cache that are its row's own.

A masked call reads as many columns of each row as the longest has. Here programs read those of
their row, and what rows begin with in common is read once for up to :data:`COPIES` of them, whose
queries are rows of one product (Hydragen, arXiv:2402.05099, section 3.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.kernels.support import define, next_power_of_2

COPIES = 8  # rows that read together what they share
NOWHERE = 2**30  # a column that no cache has
MOST_SIZE = 256  # of a head
_MOST_QUERIES, _TILE_BYTES = 64, 2**14  # of a program's queries
_BLOCK_BYTES, _STAGES = 2**13, 3  # of keys that a program reads at once, and how often ahead
_SPLIT_COLUMNS, _TILE_COLUMNS, _MOST_SPLITS = 128, 512, 32


@dataclass(frozen=True)
class OwnColumns:
    """Which columns each row attends to with the one token of a step; tensors on the device.

    Attributes:
        first, last: (rows,) int64; row i attends to columns ``first[i]`` to ``last[i]``, both
            included; to none where ``first[i]`` is :data:`NOWHERE`.
        own: (rows,) int64; columns of row i before ``own[i]``, if any, are those of a tile.
        tiles: (tiles, :data:`COPIES`) int64 rows that hold the same in their columns before
            ``own``, or -1; each row that has such columns is there once. None: no row has.
        window: a row attends to the last so many columns alone; None: all.
    """

    first: Tensor
    own: Tensor
    last: Tensor
    tiles: Tensor | None = None
    window: int | None = None


def attend_own_columns(
    query: Tensor, key: Tensor, value: Tensor, columns: OwnColumns, *, scale: float
) -> Tensor:
    """(rows, heads, D) attention of one token of each row; zeros where it has no columns.

    Where rows and key heads would not fill the device, the columns of each are split, and a second
    launch combines the parts.

    Args:
        query: (rows, heads, D), where heads are a multiple of key heads.
        key: (rows, key heads, columns, D).
        value: likewise, with the strides of the keys.
        columns: which of them each row attends to.
        scale: multiplies the products of queries and keys.
    """
    splits = splits_of(key.shape, processors(key.device), columns.tiles is not None)
    first, own = columns.first, columns.own
    window = NOWHERE if columns.window is None else columns.window
    parts, sums = attend_columns(
        query, key, value, first, own, columns.last, columns.tiles, scale, window, *splits
    )
    if sum(splits) == 1:
        return parts[:, :, 0]
    return combine_parts(parts, sums, first, own, query, splits[0])


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 of a CPU, where nothing is split."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def splits_of(shape: Sequence[int], processors: int, shares: bool) -> tuple[int, int]:
    """Parts that a row's own columns are read in, and those of a tile: 0 where none ``shares`` any.

    ``shape`` is of keys. A part is written for each row of a tile, which must be worth it.
    """
    rows, heads, columns, _ = shape
    of_row = _splits(rows * heads, columns // _SPLIT_COLUMNS, processors)
    tiles = -(-rows // COPIES)
    return of_row, _splits(tiles * heads, columns // _TILE_COLUMNS, processors) if shares else 0


def _splits(programs: int, most: int, processors: int) -> int:
    """A power of two, with which programs have as many bytes on their way as memory gives."""
    splits = 1
    while 2 * splits * programs < 3 * processors and 2 * splits <= min(most, _MOST_SPLITS):
        splits *= 2
    return splits


def blocks(size: int, itemsize: int, heads: int) -> tuple[int, int, int, int]:
    """(PADDED_SIZE, PADDED_HEADS, COPIES, COLUMNS) of a program for so many heads of a key head."""
    padded_size, padded_heads = map(next_power_of_2, (max(16, size), heads))
    queries = min(_MOST_QUERIES, _TILE_BYTES // (padded_size * itemsize))
    copies = min(COPIES, max(1, queries // padded_heads))
    columns = min(64, max(16, _BLOCK_BYTES // (padded_size * itemsize)))
    return padded_size, padded_heads, copies, columns


def _attend_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    own: Tensor,
    last: Tensor,
    tiles: Tensor | None,
    scale: float,
    window: int,
    row_splits: int,
    tile_splits: int,
) -> tuple[Tensor, Tensor]:
    from dschat_lora.kernels.attention_kernels import attend_columns

    parts, sums = _empty_parts(query, row_splits + tile_splits)
    rows, key_heads, _, size = key.shape
    heads = query.shape[1] // key_heads
    assert key.stride() == value.stride()
    assert key.stride(3) == query.stride(2) == first.stride(0) == own.stride(0) == 1
    padded_size, padded_heads, copies, columns = blocks(size, key.itemsize, heads)
    tile_programs = 0 if tiles is None else tiles.numel() // copies * tile_splits
    options = {"ROW_SPLITS": row_splits, "TILE_SPLITS": tile_splits, "COPIES": copies}
    options |= {"HEADS": heads, "PADDED_HEADS": padded_heads, "COLUMNS": columns}
    attend_columns[(tile_programs + rows * row_splits, key_heads)](
        *(query, key, value, first, own, last, first if tiles is None else tiles, parts, sums),
        *(*query.stride()[:2], *key.stride()[:3], last.stride(0), scale, window, tile_programs),
        **options,
        SIZE=size,
        PADDED_SIZE=padded_size,
        num_stages=_STAGES,
    )
    return parts, sums


def _empty_parts(query: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Parts of an output and the base-2 logarithms of their sums, which one part does not have."""
    rows, heads, size = query.shape
    dtype = query.dtype if count == 1 else torch.float32
    parts = query.new_empty(rows, heads, count, size, dtype=dtype)
    return parts, query.new_empty(rows, heads, count * (count > 1), dtype=torch.float32)


def _combine_kernel(
    parts: Tensor, sums: Tensor, first: Tensor, own: Tensor, query: Tensor, row_splits: int
) -> Tensor:
    from dschat_lora.kernels.attention_kernels import combine_parts

    rows, heads, count, size = parts.shape
    output = query.new_empty(rows, heads, size)
    padded_parts, padded_size = map(next_power_of_2, (count, size))
    options = {"PADDED_PARTS": padded_parts, "SIZE": size, "PADDED_SIZE": padded_size}
    combine_parts[(rows * heads,)](
        *(parts, sums, first, own, output, heads), ROW_SPLITS=row_splits, PARTS=count, **options
    )
    return output


def _attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    own: Tensor,
    last: Tensor,
    tiles: Tensor | None,
    scale: float,
    window: int,
    row_splits: int,
    tile_splits: int,
) -> tuple[Tensor, Tensor]:
    """All of a row as the first of its parts."""
    parts, sums = _empty_parts(query, row_splits + tile_splits)
    columns, last = torch.arange(key.shape[2], device=key.device), last[:, None]
    if tiles is not None:
        holder, any_row = torch.arange(len(key)), tiles.amax(1, keepdim=True).expand_as(tiles)
        holder[tiles[tiles >= 0]] = any_row[tiles >= 0]
        of_tile = (columns < own[:, None])[:, None, :, None]
        key, value = (torch.where(of_tile, store[holder], store) for store in (key, value))
    seen = (columns >= torch.maximum(first[:, None], last + 1 - window)) & (columns <= last)
    if tiles is None:
        seen &= columns >= own[:, None]
    grouped = query.view(len(query), key.shape[1], -1, query.shape[2])
    # A row without columns attends to all instead, of which nothing is kept.
    mask = (seen | ~seen.any(1, keepdim=True))[:, None, None]
    output = F.scaled_dot_product_attention(grouped, key, value, mask, scale=scale)
    output = output.masked_fill(~seen.any(1)[:, None, None, None], 0)
    parts.zero_()[:, :, 0] = output.view(query.shape)
    sums.fill_(-torch.inf)[:, :, :1] = 0
    return parts, sums


def _combine_plain(
    parts: Tensor, sums: Tensor, first: Tensor, own: Tensor, query: Tensor, row_splits: int
) -> Tensor:
    return (sums.exp2()[..., None] * parts).sum(2).to(query.dtype)


attend_columns = define(
    "attend_columns",
    _attend_kernel,
    plain=_attend_plain,
    fake=lambda query, *others: _empty_parts(query, sum(others[-2:])),
)
combine_parts = define("combine_parts", _combine_kernel, plain=_combine_plain)
