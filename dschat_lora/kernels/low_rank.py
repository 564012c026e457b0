"""Updates of low rank added to products, with what follows them in the same kernel.

``products`` are (N, out + K) of an input with weights of layers one after another and then the
first factors of their adapters, ``x [W; A]^T``; ``up`` are the second factors, (out, rank), of
layer i to be multiplied by the K's columns from ``i * rank`` on. Sums are in fp32 and rounded once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.kernels.support import define, next_power_of_2

MOST_LAYERS = 3  # of one product
_ONE_TILE = 16  # rows, the fewest that tensor cores take


def rank_of(up: Tensor | None) -> tuple[int, int]:
    """The rank, 0 without an update, and how much of it is multiplied at a time."""
    rank = 0 if up is None else up.shape[1]
    return rank, min(64, max(16, next_power_of_2(rank)))


def tile_rows(rows: int) -> int:
    """Rows of a tile: tensor cores take 16 at least."""
    return min(64, max(_ONE_TILE, next_power_of_2(rows)))


def low_rank_plain(
    products: Tensor, up: Tensor, sizes: Sequence[int], scaling: float, relu: bool = False
) -> None:
    """Add the updates of layers with ``sizes`` of outputs to their products, in place."""
    rank, out, first = up.shape[1], sum(sizes), 0
    for number, size in enumerate(sizes):
        inner = products[:, out + number * rank :][:, :rank]
        block = slice(first, first + size)
        products[:, block].addmm_(inner, up[block].T, alpha=scaling)
        first += size
    if relu:
        products[:, :out].relu_()


def _updated(products: Tensor, up: Tensor | None, sizes: Sequence[int], scaling: float) -> Tensor:
    copy = products.to(torch.float32, copy=True)
    if up is not None:
        low_rank_plain(copy, up.float(), sizes, scaling)
    return copy[:, : sum(sizes)]


def _residual_plain(
    products: Tensor, up: Tensor | None, scaling: float, residual: Tensor
) -> Tensor:
    update = _updated(products, up, [residual.shape[1]], scaling)
    return (residual + update).to(residual.dtype)


def _swiglu_plain(products: Tensor, up: Tensor | None, scaling: float, size: int) -> Tensor:
    gate, x = _updated(products, up, [size, size], scaling).chunk(2, 1)
    return (F.silu(gate) * x).to(products.dtype)


def _add_kernel(
    products: Tensor, up: Tensor, sizes: Sequence[int], scaling: float, relu: bool = False
) -> None:
    from dschat_lora.kernels.low_rank_kernels import add_kernel

    assert len(sizes) <= MOST_LAYERS
    first, second, third = (*sizes, 0, 0)[:MOST_LAYERS]
    _launch(
        add_kernel,
        sizes,
        (products, products, products, up, products.stride(0), products.stride(0)),
        (up.stride(0), len(products), first, second, third, scaling),
        up,
        RELU=relu,
        RESIDUAL=False,
    )


def _residual_kernel(
    products: Tensor, up: Tensor | None, scaling: float, residual: Tensor
) -> Tensor:
    from dschat_lora.kernels.low_rank_kernels import add_kernel

    output = torch.empty_like(residual)
    rows, size = residual.shape
    assert residual.is_contiguous()
    _launch(
        add_kernel,
        [size],
        (products, residual, output, products if up is None else up, products.stride(0), size),
        (0 if up is None else up.stride(0), rows, size, 0, 0, scaling),
        up,
        RELU=False,
        RESIDUAL=True,
    )
    return output


def _swiglu_kernel(products: Tensor, up: Tensor | None, scaling: float, size: int) -> Tensor:
    from dschat_lora.kernels.low_rank_kernels import swiglu_update_kernel

    output = products.new_empty(len(products), size)
    factors = products if up is None else up
    step = 0 if up is None else up.stride(0)
    arguments = (products, output, factors, products.stride(0), step, len(products), size, scaling)
    _launch(swiglu_update_kernel, [size], arguments, (), up)
    return output


def _launch(
    kernel: Any,
    sizes: Sequence[int],
    first: tuple[Any, ...],
    then: tuple[Any, ...],
    up: Tensor | None,
    **options: bool,
) -> None:
    products = first[0]
    assert products.stride(1) == 1
    assert up is None or up.stride(1) == 1
    rows, (rank, step) = len(products), rank_of(up)
    # Few rows: narrow tiles, so that they are as many as the card has processors.
    height, width = tile_rows(rows), 32 if rows <= 64 else 64
    grid = (-(-rows // height), sum(-(-size // width) for size in sizes))
    if grid[0]:
        kernel[grid](*first, *then, RANK=rank, STEP=step, ROWS=height, WIDTH=width, **options)


# add_low_rank: in place. low_rank_residual: ``residual`` and a layer's output, (N, out).
# low_rank_swiglu: ``silu(gate) * x`` of two layers of one size (arXiv:2002.05202, eq. 5).
add_low_rank = define("add_low_rank", _add_kernel, plain=low_rank_plain, writes=("products",))
low_rank_residual = define("low_rank_residual", _residual_kernel, plain=_residual_plain)
low_rank_swiglu = define("low_rank_swiglu", _swiglu_kernel, plain=_swiglu_plain)
