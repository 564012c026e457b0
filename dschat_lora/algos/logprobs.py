"""Log-probabilities and entropies of given tokens, computed in chunks of logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dschat_lora.algos.sft import chunk_rows, head_logits
from dschat_lora.algos.vocabulary import VocabularyPart, add_at_, log_softmax


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

    Arguments are as for :func:`~dschat_lora.algos.sft.linear_cross_entropy`, with (N,) int64
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
        ctx: Any,
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
        ctx: Any, grad_logprobs: Tensor, _grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        scaled = None
        if gradient is not None:
            scaled = gradient * grad_logprobs[:, None].to(gradient.dtype)
        return scaled, None, None, None, None, None, None
