"""Heads of one token a row made ready for attention, and its keys and values stored, in one kernel.

``place_heads`` takes products of a layer's queries, keys and values, adds updates of low rank,
norms queries and keys (arXiv:2010.04245), rotates them by (x1, x2) -> (x1 cos - x2 sin, x2 cos +
x1 sin) of halves (arXiv:2104.09864), and writes keys and values where the cache has them. Sums are
in fp32 and rounded once.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.kernels.low_rank import rank_of, tile_rows
from dschat_lora.kernels.support import define, next_power_of_2


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inner: Tensor | None,
    up: Tensor | None,
    scaling: float,
    cos: Tensor | None,
    sin: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
) -> None:
    placed, first = [], 0
    for number, (heads, weight) in enumerate([(query, query_norm), (key, key_norm), (value, None)]):
        x, size = heads.float(), heads[0].numel()
        if inner is not None and up is not None:
            own = inner[:, number * up.shape[1] :][:, : up.shape[1]].float()
            update = own @ up[first : first + size].float().T
            x, first = x + scaling * update.view(x.shape), first + size
        if weight is not None:
            x = F.rms_norm(x, weight.shape, weight.float(), eps)
        if cos is not None and sin is not None and number < 2:
            x1, x2 = x.chunk(2, -1)
            x = x * cos.float()[:, None] + torch.cat([-x2, x1], -1) * sin.float()[:, None]
        placed.append(x.to(heads.dtype))
    rows = torch.arange(len(query), device=query.device)
    query.copy_(placed[0])
    keys[rows, :, columns], values[rows, :, columns] = placed[1], placed[2]


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inner: Tensor | None,
    up: Tensor | None,
    scaling: float,
    cos: Tensor | None,
    sin: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
) -> None:
    from dschat_lora.kernels.heads_kernels import heads_kernel

    (rows, heads, size), key_heads = query.shape, key.shape[1]
    whole = (query, key, value, cos, sin, keys, values, query_norm, key_norm, inner, up)
    assert all(x is None or x.stride(-1) == 1 for x in whole)
    assert all(x.stride(1) == size for x in (query, key, value) if x.shape[1] > 1)
    assert keys.stride() == values.stride()
    assert cos is None or sin is None or cos.stride() == sin.stride()
    rank, step = rank_of(up)
    height = tile_rows(rows)
    if not rows:
        return
    heads_kernel[(-(-rows // height), heads + 2 * key_heads)](
        *(query, key, value, *(query if x is None else x for x in (inner, up, cos, sin))),
        *(query if x is None else x for x in (query_norm, key_norm)),
        *(keys, values, columns),
        *(x.stride(0) for x in (query, key, value)),
        *(0 if x is None else x.stride(0) for x in (inner, up, cos)),
        *keys.stride()[:3],
        *(columns.stride(0), rows, heads, key_heads, scaling, eps),
        RANK=rank,
        STEP=step,
        ROWS=height,
        HALF=size // 2,
        WIDTH=max(16, next_power_of_2(size // 2)),
        NORMS=query_norm is not None,
        ROTATES=cos is not None,
    )


# query (N, heads, D), changed in place; key and value (N, key heads, D), not; D even. inner (N, 3
# ranks or more) products with first factors and up (all heads x D, rank) second ones. cos and sin
# (N, D). query_norm and key_norm (D,), both or none. keys and values (N or more, key heads,
# columns, D) of the cache, columns (N,) int64 where each row's token goes.
place_heads: Callable[..., None] = define(
    "place_heads", _kernel, plain=_plain, writes=("query", "keys", "values")
)
