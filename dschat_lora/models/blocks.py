"""Attention within samples alone: blocks of one row, where a mask would strike out the rest."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def block_sizes(segment_ids: Tensor, branch_ids: Tensor | None) -> Tensor:
    """Where the samples of rows begin and end, in place of a mask: see :func:`attend_by_blocks`.

    Args:
        segment_ids: (B, T) int64, as for ``block_causal_mask``.
        branch_ids: (B, T) int64 or None, as there.

    Returns:
        (1, 1, S, 3) int64: of each sample, row by row, the tokens that its branches begin with
        and those of either branch.
    """
    real = segment_ids > 0
    rows = torch.arange(len(segment_ids), device=segment_ids.device)[:, None]
    samples = (rows * (segment_ids.max() + 1) + segment_ids)[real]
    found, sample = torch.unique_consecutive(samples, return_inverse=True)
    branch = 0 if branch_ids is None else branch_ids[real]
    return torch.bincount(3 * sample + branch, minlength=3 * len(found)).view(1, 1, -1, 3)


def attend_by_blocks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of each sample by itself, where the mask is of :func:`block_sizes`.

    No product is formed that a mask would strike out, but for half of those of a branch with
    itself. Other masks are passed on to the implementation that transformers calls "sdpa".

    Args:
        module: the attention layer.
        query: (1, heads, N, D), all samples one after another, no padding.
        key: (1, key heads, N, D).
        value: (1, key heads, N, D).
        attention_mask: sizes, or what "sdpa" takes.
        **options: as for "sdpa".
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    sizes = attention_mask.flatten(0, 2).tolist()
    # A tree is its first sequence, which is causal, and its second branch.
    lengths = [n for shared, first, second in sizes for n in (shared + first, second)]
    queries, keys, values = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    outputs = []
    for index, (shared, _, second) in enumerate(sizes):
        one, two = 2 * index, 2 * index + 1
        outputs.append(
            sdpa_attention_forward(module, queries[one], keys[one], values[one], None, **options)[0]
        )
        if second:
            k, v = (torch.cat([x[one][:, :, :shared], x[two]], dim=2) for x in (keys, values))
            visible = torch.ones(second, shared + second, dtype=torch.bool, device=k.device)
            mask = visible.tril(shared)[None, None]
            outputs.append(sdpa_attention_forward(module, queries[two], k, v, mask, **options)[0])
    return torch.cat(outputs, dim=1), None


def understand_blocks() -> None:
    """Have transformers' "sdpa" take :func:`block_sizes` for a mask too, in this process.

    Models look that name up at every call, so layers that are computed again in the backward
    pass find it, and generation does what it did.
    """
    AttentionInterface.register("sdpa", attend_by_blocks)
