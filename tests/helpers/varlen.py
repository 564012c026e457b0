"""The kernel of attention over sequences of several lengths, by a mask."""

import torch


def masked_attention(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """torch's ``varlen_attn``, which reads ends on the device alone, as a graph records it.

    NaN where a sequence is longer than is said, and where a token is of none.
    """
    queries, keys = torch.arange(len(query)), torch.arange(len(key))
    of_query, of_key = (
        torch.searchsorted(ends[1:].long(), places, right=True)
        for ends, places in ((cu_seq_q, queries), (cu_seq_k, keys))
    )
    known = of_query.clamp(max=len(cu_seq_q) - 2)
    # the last query stands where the last key does
    place = cu_seq_k[1:][known] - cu_seq_q[1:][known] + queries
    seen = (of_query[:, None] == of_key) & (keys <= place[:, None])
    if window_size[0] >= 0:
        seen &= keys >= place[:, None] - window_size[0]
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * torch.einsum("qhd,khd->hqk", query, key)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    fits = (cu_seq_q.diff() <= max_q).all() & (cu_seq_k.diff() <= max_k).all()
    return torch.einsum("hqk,khd->qhd", weights, value) + torch.where(fits, 0.0, torch.nan)
