"""Attention of packed rows: each sequence attends to itself alone."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.algos.segments import Spans
from dschat_lora.engine.distributed import planned_varlen

_MODULE, _FLASH_3 = "torch.nn.attention.varlen", "flash_attn_interface"
# From so many positions of a sequence on, FlashAttention 3 (arXiv:2407.08608) is worth its call.
LONG = 4096
# Beyond, the backward pass needs more shared memory than some of the GPUs have.
MAX_HEAD_SIZE = 192
# Options of layers that the kernel has, that change nothing, or that are checked below.
_KNOWN = {"dropout", "is_causal", "position_ids", "scaling", "sliding_window", "use_cache"}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_by_spans(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    spans: Spans | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of each sequence by itself, where the model was called with ``spans``.

    No product is formed that a mask would strike out, but for half of those of a branch with
    itself. Without spans this is what transformers calls "sdpa".

    ``query`` is (1, heads, N, D), ``key`` and ``value`` are (1, key heads, N, D): all sequences one
    after another, no padding. The mask has no meaning beside spans; of the options
    ``sliding_window`` counts there too, the positions that a query sees, its own included. Where
    ranks divide the tokens (``spans.context``), each attends by some of the heads to all of them.
    """
    if spans is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if (context := spans.context) is None:
        return _attend(module, query, key, value, spans, options), None
    # As many key heads as can be dealt out, each beside the queries that read it.
    repeats = math.lcm(key.shape[1], context.size) // key.shape[1]
    query, key, value = (
        context.swap(x) for x in (query, *(x.repeat_interleave(repeats, 1) for x in (key, value)))
    )
    # What transformers reads of a layer; a rank's heads may be grouped otherwise than the layer's.
    groups, causal = query.shape[1] // key.shape[1], getattr(module, "is_causal", True)
    heads = nn.Module()
    vars(heads).update(num_key_value_groups=groups, is_causal=causal)
    return context.swap(_attend(heads, query, key, value, spans, options)), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    options: Mapping[str, Any],
) -> Tensor:
    """(1, N, heads, D) of heads of which all tokens are here, see :func:`attend_by_spans`."""
    if spans.mutual is None and varlen_takes(query, key, value, options):
        scaling, window = options.get("scaling"), options.get("sliding_window")
        return varlen_attend(query, key, value, spans, scaling=scaling, window=window)
    window = options.get("sliding_window")
    tokens = [queries for queries, _ in spans.lengths]
    outputs: list[Tensor] = []
    before = None
    parts = (torch.split(x, tokens, dim=2) for x in (query, key, value))
    mutual = [None] * len(tokens) if spans.mutual is None else torch.split(spans.mutual, tokens)
    for q, k, v, own, (queries, keys) in zip(*parts, mutual, spans.lengths, strict=True):
        seen_k, seen_v = k, v
        if keys > queries:
            # A further branch; the first stands before it with what all begin with.
            assert before is not None
            shared = keys - queries
            seen_k, seen_v = (
                torch.cat([x[:, :, :shared], own], dim=2)
                for x, own in zip(before, (k, v), strict=True)
            )
        mask = None  # all that precedes
        if queries < keys or (window is not None and window < keys):
            mask = _mask(queries, keys, window, q.device)
        if own is not None and keys == queries and bool(own.any()):
            later = (own[:, None] == own) & (own != 0 if window else own > 0)
            mask = _mask(queries, keys, window, q.device) if mask is None else mask
            mask = mask | later.triu(1)
        outputs.append(sdpa_attention_forward(module, q, seen_k, seen_v, mask, **options)[0])
        if keys == queries:
            before = k, v
    return torch.cat(outputs, dim=1)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(1, 1, queries, keys) bool, True where a query sees a key; of the last queries."""
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


def fits(head_size: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE


def has_varlen(device: torch.device | None, dtype: torch.dtype) -> bool:
    """Whether sequences of this type are computed in one call on ``device``; None: as planned."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    if device is None:
        return bool(planned_varlen()) and kernel() is not None
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and kernel() is not None
    )


@cache
def kernel() -> Callable[..., Any] | None:
    """Torch's function; None in versions whose one knows no windows, so no causal mask either."""
    if find_spec(_MODULE) is None:
        return None
    function: Callable[..., Any] = import_module(_MODULE).varlen_attn
    return function if "window_size" in _options(function) else None


@cache
def flash_3(device: torch.device) -> Callable[..., Any] | None:
    """FlashAttention 3 for long sequences, where it is installed and ``device`` is a Hopper GPU."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    if find_spec(_FLASH_3) is None:
        return None
    function: Callable[..., Any] = import_module(_FLASH_3).flash_attn_varlen_func
    return function


@cache
def _options(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def varlen_takes(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether :func:`varlen_attend` computes a layer with these tensors and further options."""
    size = query.shape[-1]
    others = {name: options[name] for name in options.keys() - _KNOWN}
    return (
        all(value is None or value is False for value in others.values())
        and not options.get("dropout")
        and options.get("is_causal") is not False
        and size == value.shape[-1]
        and fits(size)
        and query.dtype == key.dtype == value.dtype
        and has_varlen(query.device, query.dtype)
    )


def varlen_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    *,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """(1, N, heads, D) of causal attention of each sequence, without waiting for the device.

    ``query`` is (1, heads, N, D) in 16 bits, ``key`` and ``value`` are (1, key heads, N, D), heads
    a multiple of key heads. ``scaling`` None is ``D ** -0.5``; ``window`` counts the positions that
    a query sees, its own included.
    """
    is_grouped, before = key.shape[1] != query.shape[1], -1 if window is None else window - 1
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if spans.keys is not None:
        key, value = (x.index_select(0, spans.keys) for x in (key, value))
    # Where queries are fewer than keys the kernels take them for the last ones.
    given = query, key, value, spans.query_ends, spans.key_ends, *spans.longest
    long = flash_3(query.device) if spans.longest[1] >= LONG else None
    if long is not None:
        options = {"softmax_scale": scaling, "causal": True, "window_size": (before, 0)}
        attended: Tensor | tuple[Tensor, ...] = long(*given, **options)
        # Versions before 3.0 proper return the log-sum-exp too.
        return (attended if isinstance(attended, Tensor) else attended[0])[None]
    function = kernel()
    assert function is not None
    # Versions without the option always take grouped queries.
    options = {"enable_gqa": is_grouped} if "enable_gqa" in _options(function) else {}
    output: Tensor = function(*given, scale=scaling, window_size=(before, 0), **options)
    return output[None]


def flex_mask(
    segment_ids: Tensor,
    position_ids: Tensor,
    *,
    window: int | None = None,
    branch_ids: Tensor | None = None,
) -> BlockMask:
    """What :func:`~dschat_lora.algos.segments.block_causal_mask` lets through, made once a batch.

    All ids are (B, T) int64, as there; ``window`` is the positions a sliding window spans.
    """

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (segment_ids[row, query] == segment_ids[row, key]) & (key <= query)
        if branch_ids is not None:
            branch = branch_ids[row, key]
            seen = seen & ((branch == 0) | (branch == branch_ids[row, query]))
        if window is not None:
            seen = seen & (position_ids[row, query] - position_ids[row, key] < window)
        return seen

    rows, width = segment_ids.shape
    device = segment_ids.device.type
    return create_block_mask(visible, rows, None, width, width, device=device)
