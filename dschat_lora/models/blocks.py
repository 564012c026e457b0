"""Attention by spans: each sequence of a packed row attends to itself alone."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.algos.segments import Spans
from dschat_lora.models import varlen


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_by_spans(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    spans: Spans | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of each sequence by itself, where the model was called with ``spans``.

    No product is formed that a mask would strike out, but for half of those of a branch with
    itself. Without spans this is what transformers calls "sdpa".

    ``query`` is (1, heads, N, D), ``key`` and ``value`` are (1, key heads, N, D): all sequences one
    after another, no padding. The mask has no meaning beside spans; of the options
    ``sliding_window`` counts there too, the positions that a query sees, its own included.
    """
    if spans is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if varlen.takes(query, key, value, options):
        scaling, window = options.get("scaling"), options.get("sliding_window")
        output = varlen.attend(query, key, value, spans, scaling=scaling, window=window)
        return output, None
    return _one_by_one(module, query, key, value, spans, options), None


def _one_by_one(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    options: dict[str, Any],
) -> Tensor:
    """(1, N, heads, D) by one call of "sdpa" a sequence."""
    window = options.get("sliding_window")
    tokens = [queries for queries, _ in spans.lengths]
    outputs: list[Tensor] = []
    before = None
    parts = (torch.split(x, tokens, dim=2) for x in (query, key, value))
    for q, k, v, (queries, keys) in zip(*parts, spans.lengths, strict=True):
        seen_k, seen_v = k, v
        if keys > queries:
            # A further branch; the first stands before it with what all begin with.
            assert before is not None
            shared = keys - queries
            seen_k, seen_v = (
                torch.cat([x[:, :, :shared], own], dim=2)
                for x, own in zip(before, (k, v), strict=True)
            )
        mask = _mask(queries, keys, window, q.device)
        outputs.append(sdpa_attention_forward(module, q, seen_k, seen_v, mask, **options)[0])
        if keys == queries:
            before = k, v
    return torch.cat(outputs, dim=1)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """(1, 1, queries, keys) bool, True where a query sees a key; None: all that precedes."""
    if queries == keys and (window is None or keys <= window):
        return None
    earlier = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(earlier)
    if window is not None:
        visible = visible.triu(earlier - window + 1)
    return visible[None, None]


def understand_spans() -> None:
    """Have models that attend by transformers' "sdpa" take ``spans`` too, in this process.

    Models look that name up at every call, so layers that are computed again in the backward
    pass find it, and generation does what it did.
    """
    AttentionInterface.register("sdpa", attend_by_spans)
