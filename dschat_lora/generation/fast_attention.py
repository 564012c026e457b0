"""Attention of a few new tokens on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.generation.kv_cache import SharedPrompts

MAX_PRODUCT_TOKENS = 64  # for more, the fused kernel of attention is better
_ATTENTION = "dschat_lora_decode"
# Options of attention layers without effect where a mask is given, out of training.
_WITHOUT_EFFECT = {"dropout", "is_causal", "position_ids", "sliding_window", "use_cache"}


@contextmanager
def fast_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, layers that use "sdpa" on a CPU attend from few tokens by plain products.

    The fused kernel is made for many; on a CPU it took two to ten times as long for one.
    Masks must be given whole: transformers makes none for attention it does not know.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or model.device.type != "cpu":
        yield
        return
    AttentionInterface.register(_ATTENTION, attend_by_products)
    try:
        config._attn_implementation = _ATTENTION
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend_by_products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' "sdpa", to which it falls back for many tokens.

    Of (B, heads, T, D) queries, and (B, key heads, columns, D) keys and values, where heads are a
    multiple of key heads, under a (B, 1, T, columns) additive mask.

    Returns:
        (B, T, heads, D), and None for weights.
    """
    rows, heads, tokens, size = query.shape
    unknown = bool(options.keys() - _WITHOUT_EFFECT)
    if unknown or scaling is None or attention_mask is None or tokens > MAX_PRODUCT_TOKENS:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if scaling != 1:
        query = query * scaling
    # Heads that share a key (grouped-query attention) are rows of one product.
    grouped = query.reshape(rows, key.shape[1], -1, size)
    shared: SharedPrompts | None = getattr(key, "prompts", None)
    if shared is not None and (
        # most responses have ended, or the layer attends to other values than it has stored
        2 * len(shared.keys) > rows or getattr(value, "prompts", None) is not shared
    ):
        shared = None
    width = 0 if shared is None else shared.keys.shape[2]
    scores = torch.matmul(grouped, key[:, :, width:].transpose(2, 3))
    if shared is not None:
        before = _of_prompts(grouped, shared.keys.transpose(2, 3), shared)
        scores = torch.cat([before, scores], -1)
    scores = scores.view(rows, heads, tokens, -1).add_(attention_mask)
    weights = scores.softmax(-1).view(*grouped.shape[:3], -1)
    output = torch.matmul(weights[..., width:], value[:, :, width:])
    if shared is not None:
        output += _of_prompts(weights[..., :width], shared.values, shared)
    return output.view(rows, heads, tokens, -1).transpose(1, 2), None


def _of_prompts(rows: Tensor, matrices: Tensor, shared: SharedPrompts) -> Tensor:
    """(rows, heads, n, q) product of each row and the matrix of its prompt.

    ``rows`` are (rows, heads, n, p), ``matrices`` (prompts, heads, p, q).
    """
    _, heads, count, width = rows.shape
    prompts, copies = len(matrices), shared.copies
    ordered = rows.new_zeros(prompts * copies, heads, count, width)
    ordered.index_copy_(0, shared.sequences, rows)
    ordered = ordered.view(prompts, copies, heads, count, width).transpose(1, 2)
    products = torch.matmul(ordered.reshape(prompts, heads, copies * count, width), matrices)
    products = products.view(prompts, heads, copies, count, -1).transpose(1, 2)
    return products.flatten(0, 1).index_select(0, shared.sequences)
