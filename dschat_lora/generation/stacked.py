"""Linear layers that read one input, computed by one product with all their weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_MULTIPLE = 8  # rows that tensor cores take at once, in 16-bit types
_STACK = "stack"  # attribute of a moved weight: address and bytes of the matrix that it is part of


class StackedLinears:
    """``x W^T + b``, and of adapters ``scaling * x A^T B^T``, of layers that read one input.

    The first layer called computes them for all. Where a layer is given another tensor than the
    one before it, they are computed anew.

    Args:
        stack: (out + rank, in) weights of the layers one after another, then their A.
        bias: (out + rank,), 0 for the rows of A, or None.
        sizes: outputs of each layer; out is their sum.
        up: (rank, out), block by block B^T of each layer, else 0; None without adapters.
        scaling: of the update.
    """

    def __init__(
        self,
        stack: Tensor,
        bias: Tensor | None,
        sizes: Sequence[int],
        up: Tensor | None = None,
        scaling: float = 1.0,
    ) -> None:
        self._stack, self._bias, self._up, self._scaling = stack, bias, up, scaling
        self._sizes, self._out = list(sizes), sum(sizes)
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def read(self, number: int, x: Tensor) -> Tensor:
        """(..., size) output of the layer with this number, for (..., in) x."""
        if x is not self._input:
            self._input, self._outputs = x, torch.split(self._compute(x), self._sizes, dim=1)
        output = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return output.view(*x.shape[:-1], output.shape[1])

    def _compute(self, x: Tensor) -> Tensor:
        products = F.linear(x.reshape(-1, x.shape[-1]), self._stack, self._bias)
        if self._up is None:
            return products
        outputs = products[:, : self._out]
        return outputs.addmm_(products[:, self._out :], self._up, alpha=self._scaling)


def stack_weights(weights: Sequence[nn.Parameter], *, spare: int) -> Tensor:
    """(rows, in) matrix that these weights are part of, one after another, and then spare rows.

    They are moved there, unless an earlier call has done so. Spare rows are at least ``spare``,
    0 at first, and belong to no parameter.
    """
    out = sum(len(weight) for weight in weights)
    first = weights[0]
    rows = out + spare + -(out + spare) % ROWS_MULTIPLE
    if _are_stacked(weights, rows):
        return first.data.as_strided((rows, first.shape[1]), (first.shape[1], 1), 0)
    stack = first.data.new_zeros(rows, first.shape[1])
    storage = stack.untyped_storage()
    for weight, part in zip(weights, torch.split(stack[:out], [*map(len, weights)]), strict=True):
        weight.data = part.copy_(weight.data)
        setattr(weight, _STACK, (storage.data_ptr(), storage.nbytes()))
    return stack


def _are_stacked(weights: Sequence[nn.Parameter], rows: int) -> bool:
    """Whether weights lie where :func:`stack_weights` has put them, with ``rows`` rows or more."""
    first, offset = weights[0], 0
    storage = first.untyped_storage()
    here = storage.data_ptr(), storage.nbytes()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == here[0] and weight.is_contiguous()
        if getattr(weight, _STACK, None) != here or not same or weight.storage_offset() != offset:
            return False
        offset += weight.numel()
    return here[1] >= rows * first.shape[1] * first.element_size()
