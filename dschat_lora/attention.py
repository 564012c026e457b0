"""Who may look at whom: masks that keep the samples of a packed row apart."""

import torch
from torch import Tensor


def block_causal_mask(segment_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask by which a position sees itself and what precedes it in its own sample.

    Given to the model explicitly: deriving it from position ids is left out by some
    architectures (OPT in transformers 5), which then mix the samples of a row.

    Args:
        segment_ids: (B, T) int64, the sample each position belongs to, 0 on padding.
        dtype: compute type of the model.

    Returns:
        (B, 1, T, T) of ``dtype``: 0 where query (row) may see key (column), else the most
        negative finite number. Padding sees padding, so that no row is empty.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    mask = torch.zeros(same.shape, dtype=dtype, device=segment_ids.device)
    return mask.masked_fill_(~(same & causal), torch.finfo(dtype).min)[:, None]
