"""Log-probabilities of given tokens, never holding all logits at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.algos.sft import MAX_CHUNK_LOGITS


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
) -> Tensor:
    """``log softmax(hidden W^T + b)`` at the given tokens, for a head that does not train.

    Logits are formed for a chunk of positions at a time. With ``p`` the softmax, one position
    has the gradient ``W[token] - W^T p`` whatever the loss makes of its log-probability, so it
    is formed along with the logits and scaled in the backward pass.

    Args:
        hidden: (N, H), any float dtype; logits are reduced in fp32.
        weight: (V, H) output embedding; gets no gradient.
        bias: (V,) or None; gets no gradient.
        tokens: (N,) int64 in [0, V).
        max_chunk_logits: bound on the logits alive at a time; at least one position is done.

    Returns:
        (N,) fp32, in nats.
    """
    rows = max(1, max_chunk_logits // weight.shape[0])
    logprobs: Tensor = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight.detach(), None if bias is None else bias.detach(), tokens, rows
    )
    return logprobs


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(N,) fp32 log-probabilities of (N,) tokens under (N, V) logits, in nats."""
    return -F.cross_entropy(logits.float(), tokens, reduction="none")


def sequence_sums(values: Tensor, owner: Tensor, num_sequences: int) -> Tensor:
    """Sum over the tokens of each sequence.

    Args:
        values: (N,) one for each token.
        owner: (N,) int64 in [0, num_sequences), the sequence each token belongs to.
        num_sequences: how many there are.

    Returns:
        (num_sequences,); 0 for a sequence without tokens.
    """
    return values.new_zeros(num_sequences).index_add(0, owner, values)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, rows: int
    ) -> Tensor:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        logprobs = hidden.new_empty(len(tokens), dtype=torch.float32)
        for start in range(0, len(tokens), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(hidden[chunk], weight, bias).float()
            log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            picked = tokens[chunk, None]
            logprobs[chunk] = (logits.gather(1, picked) - log_normaliser).squeeze(1)
            if gradient is not None:
                surprise = torch.exp(logits.sub_(log_normaliser)).neg_()
                surprise.scatter_add_(1, picked, surprise.new_ones(picked.shape))
                gradient[chunk] = surprise.to(hidden.dtype) @ weight
        ctx.save_for_backward(gradient)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None, None
        scaled = gradient * grad_logprobs[:, None].to(gradient.dtype)
        return scaled, None, None, None, None
