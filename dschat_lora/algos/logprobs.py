"""Cross-entropy, log-probabilities and entropies under a linear head, in chunks of logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


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


IGNORE_INDEX = -100
# Largest number of logits of a chunk: 128 MiB in fp32, which keeps a GPU busy; on a CPU 16,
# for its caches.
MAX_CHUNK_LOGITS = 2**25
MAX_CHUNK_LOGITS_CPU = 2**22
# Devices on which products of 16-bit matrices can be fp32.
_HAS_FP32_PRODUCTS = torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype")
_FP32_PRODUCTS = ("cuda",) if _HAS_FP32_PRODUCTS else ()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    max_chunk_logits: int | None = None,
    part: VocabularyPart | None = None,
    groups: "GroupSums | None" = None,
) -> Tensor:
    """Summed cross-entropy of ``softmax(hidden W^T + b)`` against ``targets``.

    Logits are formed for a chunk of positions at a time and turned into the gradient at once,
    so that no tensor holds more than ``max_chunk_logits`` of them. With
    ``p`` the softmax and ``q = (1 - label_smoothing) onehot(target) + label_smoothing / V``
    (section 7 of arXiv:1512.00567), the gradient for one position is ``W^T (p - q)``.

    Args:
        hidden: (N, H), any float dtype; logits are reduced in fp32.
        weight: (V, H) output embedding. Its gradient is computed only if it requires one.
        bias: (V,) or None.
        targets: (N,) int64 in [0, V).
        label_smoothing: share of each target spread evenly over the vocabulary, in [0, 1].
        max_chunk_logits: bound on the logits of a chunk, by default the device's; a chunk has at
            least one position.
        part: of the vocabulary that ``weight`` and ``bias`` hold; None: all of it. With a part,
            the gradient of ``hidden`` is to be summed over the processes.
        groups: of targets, whose own sums are added up there, without smoothing.

    Returns:
        Scalar in nats, fp32 (of fp64 input fp64); a sum: only the training loop knows how many
        tokens the whole optimizer step holds.
    """
    rows = chunk_rows(weight, max_chunk_logits, part)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, label_smoothing, rows, part, groups
    )
    return loss


@dataclass(frozen=True)
class GroupSums:
    """Cross-entropy by group, added up token by token, without gradient."""

    group: Tensor  # (N,) int64 in [0, G) of each token
    sums: Tensor  # (G,) float64 in nats, changed in place

    def add(self, chunk: slice, logprobs: Tensor) -> None:
        """Count these tokens' log-probabilities."""
        self.sums.index_add_(0, self.group[chunk], -logprobs.detach().double())


def chunk_rows(
    weight: Tensor, max_chunk_logits: int | None = None, part: VocabularyPart | None = None
) -> int:
    """Positions of a chunk of logits under the (V, H) head ``weight``."""
    by_device = MAX_CHUNK_LOGITS_CPU if weight.device.type == "cpu" else MAX_CHUNK_LOGITS
    columns = weight.shape[0] if part is None else part.most
    return max(1, (max_chunk_logits or by_device) // columns)


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, V) ``hidden W^T + b`` in fp32, of fp64 in fp64, with gradient.

    A GPU keeps the fp32 sums of 16-bit products: rounded to bf16, a token's log-probability would
    be off by some 0.02 nats.
    """
    if hidden.device.type in _FP32_PRODUCTS and hidden.dtype.itemsize == 2:
        logits: Tensor = _Fp32Product.apply(hidden, weight)  # type: ignore[no-untyped-call]
        return logits if bias is None else logits.add_(bias)
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(hidden.dtype, torch.float32))


class _Context(Protocol):
    """What torch hands to the passes of a function with a derivative of its own."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]
    save_for_backward: Callable[..., None]
    mark_non_differentiable: Callable[..., None]
    dtypes: tuple[torch.dtype, torch.dtype | None]


class _Fp32Product(torch.autograd.Function):
    """``x W^T`` of 16-bit matrices in fp32, of which torch has no derivative."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        narrow = grad.to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad
        return narrow @ weight if wants_x else None, narrow.T @ x if wants_weight else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        rows: int,
        part: VocabularyPart | None,
        groups: GroupSums | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None  # type: ignore[arg-type]
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits = head_logits(hidden[chunk], weight, bias)
            logprobs, picked = log_softmax(logits, targets[chunk], part)
            loss -= (1 - smoothing) * picked.sum()
            if groups is not None:
                groups.add(chunk, picked)
            if smoothing:
                over_vocabulary, size = sum_and_size(logprobs, part)
                loss -= smoothing * over_vocabulary / size
            if not any((wants_hidden, wants_weight, wants_bias)):
                continue
            error = add_at_(logprobs.exp_(), targets[chunk], smoothing - 1.0, part)
            if smoothing:
                error -= smoothing / size
            if grad_bias is not None:
                grad_bias += error.sum(0)
            narrow = error.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[chunk]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden * grad_loss,
            # In place: of a large vocabulary a second one in fp32 would be gigabytes.
            None if grad_weight is None else grad_weight.mul_(grad_loss).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad_loss).to(bias_dtype),
            *(None,) * 5,
        )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    max_chunk_logits: int | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """``log softmax(hidden W^T + b)`` at the given tokens, for a head that does not train.

    Logits are formed for a chunk of positions at a time. With ``p`` the softmax, a position's
    log-probability has the gradient ``W[token] - W^T p``, which is formed along with the logits
    and scaled in the backward pass. The result is (N,) fp32, in nats.

    Arguments are as for :func:`~dschat_lora.algos.logprobs.linear_cross_entropy`, with (N,) int64
    ``tokens`` in [0, V) for the targets; weight and bias get no gradient.
    """
    rows = chunk_rows(weight, max_chunk_logits, part)
    logprobs: Tensor
    logprobs, _ = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight.detach(), None if bias is None else bias.detach(), tokens, rows, part, False
    )
    return logprobs


def linear_logprobs_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    max_chunk_logits: int | None = None,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`linear_logprobs`, and the entropy of the softmax at each position.

    Arguments are as for :func:`linear_logprobs`. Both results are (N,) fp32, in nats. The
    entropy, in [0, log V], is for metrics: it has no gradient (see :func:`token_entropy`).
    """
    rows = chunk_rows(weight, max_chunk_logits, part)
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight.detach(), None if bias is None else bias.detach(), tokens, rows, part, True
    )
    return logprobs, entropy


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(N,) fp32 log-probabilities of (N,) tokens under (N, V) logits, in nats."""
    return -F.cross_entropy(logits.float(), tokens, reduction="none")


def token_entropy(logits: Tensor) -> Tensor:
    """(N,) fp32 entropies of the softmax of (N, V) logits, in nats, with gradient.

    A logit of -inf gives its token probability 0.
    """
    table = torch.log_softmax(logits.float(), dim=-1)
    # Without it, a token of probability 0 would give 0 times infinity.
    table = table.clamp(min=torch.finfo(table.dtype).min)
    return -(table.exp() * table).sum(-1)


def sequence_sums(values: Tensor, owner: Tensor, num_sequences: int) -> Tensor:
    """(num_sequences,) sums of (N,) values over the tokens of each sequence; 0 without tokens.

    ``owner``, (N,) int64 in [0, num_sequences), is the sequence that each token belongs to.
    """
    return values.new_zeros(num_sequences).index_add(0, owner, values)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        rows: int,
        part: VocabularyPart | None,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        logprobs = hidden.new_empty(len(tokens), dtype=torch.float32)
        entropy = torch.empty_like(logprobs) if wants_entropy else None
        for start in range(0, len(tokens), rows):
            chunk = slice(start, start + rows)
            logits = head_logits(hidden[chunk], weight, bias)
            table, logprobs[chunk] = log_softmax(logits, tokens[chunk], part)
            if gradient is None and entropy is None:
                continue
            if entropy is not None:
                # In the buffer of the logits, unless log_softmax has overwritten them. Without
                # the bound, a token of probability 0 would give 0 times infinity.
                logits = logits if part is None else torch.empty_like(logits)
                torch.clamp(table, min=torch.finfo(table.dtype).min, out=logits)
                own = logits.mul_(table.exp_()).sum(-1).neg_()
                entropy[chunk] = own if part is None else part.sum(own)
            else:
                table.exp_()
            if gradient is not None:
                # The table holds probabilities by now.
                error = add_at_(table.neg_(), tokens[chunk], 1.0, part)
                gradient[chunk] = error.to(hidden.dtype) @ weight
        ctx.save_for_backward(gradient)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_logprobs: Tensor, _grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = None
        if gradient is not None:
            scaled = gradient * grad_logprobs[:, None].to(gradient.dtype)
        return scaled, None, None, None, None, None, None
