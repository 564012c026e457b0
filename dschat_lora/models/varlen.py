"""Torch's own flash attention over sequences of unlike lengths, where a GPU has it."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.segments import Spans

_MODULE = "torch.nn.attention.varlen"
# Beyond, the backward pass needs more shared memory than some of the GPUs have.
MAX_HEAD_SIZE = 192
# Options of layers that the kernel has, that change nothing, or that are checked below.
_KNOWN = {"dropout", "is_causal", "position_ids", "scaling", "sliding_window", "use_cache"}


def fits(head_size: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether sequences of this type are computed in one call on ``device``."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
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
def _options(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def takes(query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether :func:`attend` computes a layer with these tensors and further options."""
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


def attend(
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
    function = kernel()
    assert function is not None
    # Versions without the option always take grouped queries.
    has_option = "enable_gqa" in _options(function)
    grouped = {"enable_gqa": key.shape[1] != query.shape[1]} if has_option else {}
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if spans.keys is not None:
        key, value = (x.index_select(0, spans.keys) for x in (key, value))
    # Where queries are fewer than keys the kernel takes them for the last ones.
    output: Tensor = function(
        query,
        key,
        value,
        spans.query_ends,
        spans.key_ends,
        *spans.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return output[None]
