"""Attention to a row's own columns, by the kernels, against a loop over rows."""

import os

import pytest
import torch

from dschat_lora.kernels import attention
from dschat_lora.kernels.attention import COPIES, NOWHERE, OwnColumns, attend_own_columns
from helpers.spread import ALL, pairwise
from scripts.columns_read import columns_read

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted")
COLUMNS = 150


def split_among(monkeypatch, processors):
    """Have attention split columns as on a device with so many multiprocessors."""
    monkeypatch.setattr(attention, "_SPLIT_COLUMNS", 20)
    monkeypatch.setattr(attention, "_TILE_COLUMNS", 40)
    monkeypatch.setattr(attention, "processors", lambda device: processors)


def stores(rows, heads, size, dtype=torch.float32, *, seed=0):
    """Keys and values, first rows and columns of larger stores that hold NaN beyond them."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.full((2, rows + 3, heads, COLUMNS + 9, size), torch.nan, dtype=dtype)
    pair[:, :rows, :, :COLUMNS] = torch.randn(
        2, rows, heads, COLUMNS, size, generator=generator, dtype=dtype
    )
    return pair[0, :rows, :, :COLUMNS], pair[1, :rows, :, :COLUMNS]


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)


def row_by_row(query, key, value, first, last, window=None, scale=0.3):
    """By the definition, in fp64."""
    output = torch.zeros_like(query, dtype=torch.float64)
    each = query.shape[1] // key.shape[1]
    for row, (begin, end) in enumerate(zip(first, last, strict=True)):
        begin = begin if window is None else max(begin, end + 1 - window)
        if begin > end:
            continue
        for head in range(query.shape[1]):
            keys, values = (x[row, head // each, begin : end + 1].double() for x in (key, value))
            weights = (keys @ query[row, head].double() * scale).softmax(0)
            output[row, head] = weights @ values
    return output.to(query.dtype)


def of(first, last, *, own=None, tiles=None, window=None):
    first, last = torch.tensor(first), torch.tensor(last)
    own = torch.zeros_like(first) if own is None else torch.tensor(own)
    if tiles is not None:
        tiles = torch.tensor([[*each, *[-1] * (COPIES - len(each))] for each in tiles])
    return OwnColumns(first, own, last, tiles, window)


FIRST, LAST = [0, 3, 64, NOWHERE, 149, 40], [149, 3, 127, 149, 149, 104]


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "shape": [(4, 4, 16), (6, 2, 24), (4, 1, 128)]
            + [(4, 2, 32), (7, 1, 80), (2, 1, 256)] * ALL,
            "window": [None, 7] + [1, 100] * ALL,
            "processors": [1, 40],
        }
    ),
)
def test_rows_attend_to_their_own_columns(case, monkeypatch):
    (heads, key_heads, size), window, processors = case.values()
    split_among(monkeypatch, processors)
    key, value = stores(len(FIRST), key_heads, size)
    query = draw(len(FIRST), heads, 1, size).transpose(1, 2)[:, 0]
    result = attend_own_columns(query, key, value, of(FIRST, LAST, window=window), scale=0.3)
    expected = row_by_row(query, key, value, FIRST, LAST, window)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_16_bits_are_summed_in_32(dtype):
    if dtype == torch.bfloat16 and "DSCHAT_LORA_KERNELS" not in os.environ:
        pytest.skip("Triton's interpreter multiplies none")
    key, value = stores(3, 2, 64, dtype)
    query = draw(3, 4, 64, dtype=dtype)
    first, last = [0, 0, 9], [149, 5, 149]
    result = attend_own_columns(query, key, value, of(first, last), scale=0.3)
    assert result.dtype == dtype
    expected = row_by_row(query, key, value, first, last)
    # Weights are rounded to 16 bits before the second product, as by fused attention.
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)


# Prompts of three groups: of rows 0, 2, 5, 7, of rows 1 and 6, and row 3 alone; 4 has ended.
GROUPS = [(0, 2, 5, 7), (1, 6)]
BEGIN, SHARED = [5, 0, 5, 0, NOWHERE, 5, 0, 5], [70, 33, 70, 0, 70, 70, 33, 70]
ENDS = [70, 149, 90, 100, 120, 71, 33, 149]


def with_shared(key, value):
    """The rows of each group hold in the columns before ``SHARED`` what its first row holds."""
    for rows in GROUPS:
        for row in rows[1:]:
            for store in (key, value):
                store[row, :, : SHARED[row]] = store[rows[0], :, : SHARED[row]]
    return key, value


@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "heads": [(2, 2), (12, 2)] + [(8, 2), (16, 1)] * ALL,
            "window": [None, 60] + [6, 120] * ALL,
            "processors": [1, 40],
        }
    ),
)
def test_rows_of_one_prompt_read_it_together(case, monkeypatch):
    (heads, key_heads), window, processors = case.values()
    split_among(monkeypatch, processors)
    key, value = with_shared(*stores(8, key_heads, 32))
    query = draw(8, heads, 32)
    expected = row_by_row(query, key, value, BEGIN, ENDS, window)
    columns = of(BEGIN, ENDS, own=SHARED, tiles=GROUPS, window=window)
    result = attend_own_columns(query, key, value, columns, scale=0.3)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


# Programs read for 8 rows of 4 heads, and for 4 rows of 32.
@pytest.mark.parametrize(("heads", "window"), [(4, None), (32, 60), *[(4, 60), (32, None)] * ALL])
def test_rows_read_the_columns_that_are_counted(heads, window, monkeypatch):
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if "DSCHAT_LORA_KERNELS" in os.environ:
        pytest.skip("counts loads of Triton's interpreter")
    split_among(monkeypatch, 40)
    key, value = with_shared(*stores(8, 2, 32))
    columns = of(BEGIN, ENDS, own=SHARED, tiles=GROUPS, window=window)
    read, load = [], interpreter.interpreter_builder.create_masked_load
    begin, end = key.data_ptr(), value.data_ptr()

    def note(addresses, mask, *rest):
        given = addresses.data[mask.data]
        read.append(((given >= begin) & (given < end)).sum())
        return load(addresses, mask, *rest)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_masked_load", note)
    attend_own_columns(draw(8, heads, 32), key, value, columns, scale=0.3)
    _, _, copies, _ = attention.blocks(32, key.itemsize, heads // 2)
    counted = columns_read(columns, copies=copies)
    assert sum(read) == 2 * 32 * int(counted.sum()), "keys of two heads"
    # By hand: of rows what is behind their prompts.
    own = [
        max(0, n + 1 - max(b, o, n + 1 - (window or n + 1)))
        for b, o, n in zip(BEGIN, SHARED, ENDS, strict=True)
    ]
    assert counted[:8].tolist() == own
    assert int(columns_read(columns, copies=copies, block=16).sum()) >= int(counted.sum())
