"""Exchanges between the ranks that share a layer, each with the exchange its gradient needs.

Forward and backward come in pairs (Megatron-LM, arXiv:1909.08053, section 3, and
arXiv:2205.05198, section 4.2, for the sequence): identity and sum, gather and slice, gather and
scattered sum. Sums are sums, never means.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dschat_lora.lora.autograd import Context

Exchange = Callable[[Tensor], Tensor]


class TensorGroup:
    """The ranks that hold one model between them. Call every method on all of them.

    With ``sequence_parallel`` tokens between the layers are divided among the ranks, but within
    :meth:`whole_sequences`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        rank: int,
        size: int,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        self.process_group, self.rank, self.size = process_group, rank, size
        self.sequence_parallel = sequence_parallel

    def __deepcopy__(self, memo: dict[int, object]) -> "TensorGroup":
        """The group itself: copies of a model are on the same ranks."""
        return self

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Within, every rank has all tokens, as decoding one at a time needs it."""
        before, self.sequence_parallel = self.sequence_parallel, False
        try:
            yield
        finally:
            self.sequence_parallel = before

    def enter(self, x: Tensor) -> Tensor:
        """All tokens of (..., T or T / size, H) for layers that split their output.

        Their input gradients are parts of a sum.
        """
        if self.sequence_parallel:
            return exchange(x, self._gather_tokens, self._sum_tokens)
        return self.copy(x)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of (..., T, H) parts; with sequence parallelism this rank's tokens of it."""
        if self.sequence_parallel:
            return exchange(x, self._sum_tokens, self._gather_tokens)
        return exchange(x, self.sum, _itself)

    def copy(self, x: Tensor) -> Tensor:
        """``x``, the same on every rank; its gradient is the sum of what the ranks make of it."""
        return exchange(x, _itself, self.sum)

    def alike(self, x: Tensor) -> Tensor:
        """``x``, the same on every rank, as is its gradient but for rounding: the first rank's."""
        return exchange(x, _itself, self.first)

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of (..., T, H), the same on every rank; T a multiple of size."""
        return exchange(x, self._own_tokens, self._gather_tokens)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens of the ranks' (..., T / size, H), for layers that every rank runs alike."""
        return exchange(x, self._gather_tokens, self._own_tokens)

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' sum of ``x``, without gradient."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """The ranks' maximum of ``x``, without gradient."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def first(self, x: Tensor) -> Tensor:
        """The first rank's ``x``, without gradient."""
        result = self._reachable(x.detach()).clone(memory_format=torch.contiguous_format)
        dist.broadcast(result, group=self.process_group, group_src=0)
        return result.to(x.device)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``, of one shape everywhere, without gradient."""
        return list(self._stacked(x).unbind())

    def _stacked(self, x: Tensor) -> Tensor:
        """(size, ...) of every rank's (...)."""
        own = self._reachable(x.detach()).contiguous()
        parts = own.new_empty(self.size, *own.shape)
        # gloo takes no further dimension, but numbers in a row.
        dist.all_gather_into_tensor(parts.view(-1), own.view(-1), group=self.process_group)
        return parts.to(x.device)

    def _reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        result = self._reachable(x.detach()).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=operation, group=self.process_group)
        return result.to(x.device)

    def _reachable(self, x: Tensor) -> Tensor:
        """On the device that the ranks exchange from: weights that were just read are on CPU."""
        if x.device.type != "cpu" or dist.get_backend(self.process_group) == "gloo":
            return x
        return x.to(torch.accelerator.current_accelerator())

    def _own_tokens(self, x: Tensor) -> Tensor:
        return self._by_rank(x)[self.rank].contiguous()

    def _by_rank(self, x: Tensor) -> Tensor:
        """(size, ..., T / size, H) of (..., T, H)."""
        *rows, count, width = x.shape
        if count % self.size:
            raise ValueError(f"{count} tokens cannot be dealt out evenly to {self.size} ranks")
        return x.detach().reshape(*rows, self.size, -1, width).movedim(-3, 0)

    def _gather_tokens(self, x: Tensor) -> Tensor:
        return self._stacked(x).movedim(0, -3).flatten(-3, -2)

    def _sum_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of the ranks' sum."""
        if dist.get_backend(self.process_group) == "gloo":  # which has no scattered sum
            return self._own_tokens(self.sum(x))
        parts = self._by_rank(x).contiguous()
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts, group=self.process_group)
        return own


class ContextGroup:
    """The ranks that divide the tokens of each row among them. Call every method on all of them."""

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.process_group, self.rank, self.size = process_group, rank, size

    def swap(self, x: Tensor) -> Tensor:
        """All of dimension 2 for a share of dimension 1 (an all-to-all; Ulysses, arXiv:2309.14509).

        Of (1, heads, T / size, D) it is (1, heads / size, T, D), and of (1, T, heads / size, D) it
        is (1, T / size, heads, D).
        """
        return exchange(
            x, partial(self._swap, deals=1, gathers=2), partial(self._swap, deals=2, gathers=1)
        )

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' sum of ``x``, on each of them; its gradient is the sum of theirs."""
        return exchange(x, self._sum, self._sum)

    def _sum(self, x: Tensor) -> Tensor:
        result = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self.process_group)
        return result

    def _swap(self, x: Tensor, deals: int, gathers: int) -> Tensor:
        assert x.shape[deals] % self.size == 0
        sent = torch.stack(x.chunk(self.size, deals))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.process_group)
        return torch.cat(received.unbind(), gathers)


def exchange(x: Tensor, there: Exchange, back: Exchange) -> Tensor:
    """``there(x)``, whose gradient ``g`` becomes ``back(g)``; neither records a graph."""
    return _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]


def _itself(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, there: Exchange, back: Exchange) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
