"""Tokens drawn from logits in two kernels: sums of blocks of the vocabulary, then of one block.

Weights are ``exp(logit / temperature - m)`` in fp32, m the largest of a block; their sums are in
fp64. The drawn token is the first one up to which weights sum to the uniform number times all.
"""

import torch
from torch import Tensor

from dschat_lora.kernels.support import define, next_power_of_2

BLOCK = 1024  # of the vocabulary


def draw_tokens(
    logits: Tensor,
    temperature: float,
    uniforms: Tensor,
    sequences: Tensor,
    numbers: Tensor,
    tokens: Tensor,
    logprobs: Tensor | None,
) -> Tensor:
    """(B,) int64 drawn token of each row; 0 where none can be.

    Args:
        logits: (B, V), of which a row's largest is finite and none NaN where one can be drawn.
        temperature: divides them.
        uniforms: (sequences, numbers) float64 in (0, 1].
        sequences: (B,) int64 sequence that each row holds.
        numbers: (B,) int64 number of the token that is drawn.
        tokens: (sequences, numbers) int64, where it is written; -1 where none can be drawn.
        logprobs: (sequences, numbers) fp32, where its log-probability is written; or None.
    """
    maxima, sums = block_sums(logits, temperature)
    table = uniforms, sequences, numbers, tokens, logprobs
    return draw_token(logits, maxima, sums, temperature, *table)


def _blocks(logits: Tensor) -> int:
    return -(-logits.shape[1] // BLOCK)


def _sums_plain(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    padding = _blocks(logits) * BLOCK - logits.shape[1]
    scaled = torch.nn.functional.pad(logits.float() / temperature, (0, padding), value=-torch.inf)
    blocks = scaled.unflatten(1, (-1, BLOCK))
    maxima = blocks.amax(2)
    shift = maxima.masked_fill(maxima == -torch.inf, 0.0)
    return maxima, (blocks - shift[..., None]).exp().sum(2, dtype=torch.float64)


def _sums_kernel(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    from dschat_lora.kernels.sampling_kernels import sums_kernel

    maxima = logits.new_empty(len(logits), _blocks(logits), dtype=torch.float32)
    sums = torch.empty_like(maxima, dtype=torch.float64)
    assert logits.stride(1) == 1
    if len(logits):
        arguments = (logits, maxima, sums, logits.stride(0), logits.shape[1], temperature)
        sums_kernel[maxima.shape](*arguments, BLOCK=BLOCK)
    return maxima, sums


def _draw_plain(
    logits: Tensor,
    maxima: Tensor,
    sums: Tensor,
    temperature: float,
    uniforms: Tensor,
    sequences: Tensor,
    numbers: Tensor,
    tokens: Tensor,
    logprobs: Tensor | None,
) -> Tensor:
    place, scaled = (sequences, numbers), logits.float() / temperature
    running = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = running[:, -1]
    drawn = torch.searchsorted(running, (uniforms[place] * total)[:, None])[:, 0]
    drawn = drawn.masked_fill(total != total, -1)
    tokens.index_put_(place, drawn)
    chosen = drawn.clamp(min=0)
    if logprobs is not None:
        logprobs.index_put_(place, scaled.log_softmax(-1).gather(1, chosen[:, None])[:, 0])
    return chosen


def _draw_kernel(
    logits: Tensor,
    maxima: Tensor,
    sums: Tensor,
    temperature: float,
    uniforms: Tensor,
    sequences: Tensor,
    numbers: Tensor,
    tokens: Tensor,
    logprobs: Tensor | None,
) -> Tensor:
    from dschat_lora.kernels.sampling_kernels import draw_kernel

    chosen, (rows, vocabulary) = tokens.new_empty(len(logits)), logits.shape
    assert uniforms.stride() == tokens.stride()
    assert logprobs is None or logprobs.stride() == tokens.stride()
    assert tokens.stride(1) == 1
    count = maxima.shape[1]
    if rows:
        draw_kernel[(rows,)](
            *(logits, maxima, sums, uniforms, sequences, numbers, tokens),
            *(maxima if logprobs is None else logprobs, chosen),
            *(logits.stride(0), tokens.stride(0), sequences.stride(0), numbers.stride(0)),
            *(vocabulary, count, temperature),
            BLOCK=BLOCK,
            BLOCKS=next_power_of_2(count),
            LOGPROBS=logprobs is not None,
        )
    return chosen


block_sums = define("block_sums", _sums_kernel, plain=_sums_plain)
draw_token = define(
    "draw_token",
    _draw_kernel,
    plain=_draw_plain,
    writes=("tokens", "logprobs"),
    fake=lambda logits, *_: logits.new_empty(len(logits), dtype=torch.int64),
)
