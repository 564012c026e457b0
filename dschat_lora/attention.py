"""Who may look at whom: masks that keep the samples of a packed row apart."""

import torch
from torch import Tensor


def block_causal_mask(
    segment_ids: Tensor,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    branch_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Additive mask by which a position sees itself and what precedes it in its own sample.

    Given to the model explicitly: deriving it from position ids is left out by some
    architectures, which then mix the samples of a row. Where a sample is a tree (a beginning
    and two ways to go on, one after another in the row), each way sees the beginning and
    itself, never the other.

    Args:
        segment_ids: (B, T) int64, the sample each position belongs to, 0 on padding.
        dtype: compute type of the model.
        window: positions that a sliding window spans, the query's own included; None: all.
        branch_ids: (B, T) int64, 0 where a sample's branches begin alike, else the number of
            the branch; None where every sample is one sequence.
        position_ids: (B, T) int64, place in the sequence; needed for the window of a tree,
            whose branches lie further from their beginning in the row.

    Returns:
        (B, 1, T, T) of ``dtype``: 0 where query (row) may see key (column), else the most
        negative finite number. Padding sees padding, so that no row is empty.
    """
    length = segment_ids.shape[1]
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_ids.device).tril()
    visible = same & causal
    if branch_ids is not None:
        key = branch_ids[:, None, :]
        visible &= (key == 0) | (key == branch_ids[:, :, None])
    if window is not None and position_ids is not None:
        visible &= position_ids[:, :, None] - position_ids[:, None, :] < window
    elif window is not None:
        visible &= causal.triu(1 - window)
    mask = torch.zeros(same.shape, dtype=dtype, device=segment_ids.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
