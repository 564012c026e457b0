"""Linear layers that read one input as one product, and the places of their weights."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.kernels.low_rank import add_low_rank, low_rank_plain
from dschat_lora.kernels.support import runs_kernels

ROWS_MULTIPLE = 8  # rows that tensor cores take at once, in 16-bit types
_STACK = "stack"  # attribute of a moved weight: address and bytes of the matrix that it is part of


class StackedLinears:
    """``x W^T + b``, and of adapters ``scaling * x A^T B^T``, of layers that read one input.

    The first layer called computes them for all. Where a layer is given another tensor than the
    one before it, they are computed anew.

    Args:
        stack: (out, in) weights of the layers one after another, and then their A, of one rank.
        bias: as many entries, 0 for the rows of A, or None.
        sizes: outputs of each layer; out is their sum.
        up: (out, rank) B of the layers one after another; None without adapters.
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
        self.stack, self.bias, self.up, self.scaling = stack, bias, up, scaling
        self.sizes = list(sizes)
        self._add = add_low_rank if runs_kernels(stack.device) else low_rank_plain
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def products(self, x: Tensor) -> Tensor:
        """(N, out) ``x W^T + b`` of (N, in) x, followed by ``x A^T``."""
        return F.linear(x, self.stack, self.bias)

    def add_updates(self, products: Tensor, *, relu: bool = False) -> tuple[Tensor, ...]:
        """(N, size) outputs of each layer, in the place of what :meth:`products` gave."""
        outputs = products[:, : sum(self.sizes)]
        if self.up is not None:
            self._add(products, self.up, self.sizes, self.scaling, relu)
        elif relu:
            outputs.relu_()
        return torch.split(outputs, self.sizes, dim=1)

    def read(self, number: int, x: Tensor) -> Tensor:
        """(..., size) output of the layer with this number, for (..., in) x."""
        if x is not self._input:
            outputs = self.add_updates(self.products(x.reshape(-1, x.shape[-1])))
            self._input, self._outputs = x, outputs
        output = self._outputs[number]
        if number == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output.view(*x.shape[:-1], output.shape[1])


def stack_weights(weights: Sequence[nn.Parameter], *, spare: int) -> Tensor:
    """(rows, in) matrix that these weights are part of, one after another, and then spare rows.

    They are moved there, unless an earlier call has done so. Spare rows are at least ``spare``,
    0 at first, and belong to no parameter.
    """
    out = sum(len(weight) for weight in weights)
    first = weights[0]
    rows = out + spare + -(out + spare) % ROWS_MULTIPLE
    # Whether they lie where an earlier call has put them, with as many rows or more.
    storage, offset = first.untyped_storage(), 0
    here = storage.data_ptr(), storage.nbytes()
    lie_there = here[1] >= rows * first.shape[1] * first.element_size()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == here[0] and weight.is_contiguous()
        known = getattr(weight, _STACK, None) == here and weight.storage_offset() == offset
        lie_there = lie_there and same and known
        offset += weight.numel()
    if lie_there:
        return first.data.as_strided((rows, first.shape[1]), (first.shape[1], 1), 0)
    stack = first.data.new_zeros(rows, first.shape[1])
    storage = stack.untyped_storage()
    for weight, part in zip(weights, torch.split(stack[:out], [*map(len, weights)]), strict=True):
        weight.data = part.copy_(weight.data)
        setattr(weight, _STACK, (storage.data_ptr(), storage.nbytes()))
    return stack
