"""Log-softmax over a vocabulary that may be divided among processes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class VocabularyPart:
    """The part of the vocabulary whose logits this process holds, and its collectives."""

    start: int
    stop: int  # first token id after those held here
    most: int  # largest number of ids held by a process, so that all use chunks of one size
    sum: Callable[[Tensor], Tensor]  # over the processes
    max: Callable[[Tensor], Tensor]

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of (N,) tokens here, 0 where they are elsewhere, and whether they are here."""
        inside = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(inside, tokens - self.start, 0), inside


def log_softmax(
    logits: Tensor, tokens: Tensor, part: VocabularyPart | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens held here, and of the given ones.

    With parts, the logarithm of the sum over all is formed from each process's maximum and sum,
    so that no process sees more than its own logits (Megatron-LM, arXiv:1909.08053, section 3).

    ``logits`` are (N, V) fp32 or, overwritten where there are parts, (N, V / processes);
    ``tokens`` (N,) int64 in the whole vocabulary. Returns (N, V) or (N, V / processes), and (N,),
    fp32 in nats.
    """
    if part is None:
        table = torch.log_softmax(logits, dim=-1)
        return table, table.gather(1, tokens[:, None]).squeeze(1)
    table = logits.sub_(part.max(logits.amax(-1))[:, None])
    columns, inside = part.own(tokens)
    picked = table.gather(1, columns[:, None]).squeeze(1).masked_fill(~inside, 0.0)
    total, picked = part.sum(torch.stack([table.exp().sum(-1), picked]))
    return table.sub_(total.log()[:, None]), picked - total.log()


def add_at_(table: Tensor, tokens: Tensor, value: float, part: VocabularyPart | None) -> Tensor:
    """Add ``value`` in each row of (N, V) at its token, where that is held here."""
    if part is None:
        return table.scatter_add_(1, tokens[:, None], table.new_full((len(tokens), 1), value))
    columns, inside = part.own(tokens)
    return table.scatter_add_(1, columns[:, None], (value * inside.to(table.dtype))[:, None])


def sum_and_size(table: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """The sum of (N, V) over all tokens and rows, and V, as scalars."""
    own = torch.stack([table.sum(), table.new_tensor(table.shape[-1])])
    total, size = own if part is None else part.sum(own)
    return total, size
