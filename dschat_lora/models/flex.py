"""The mask of packed rows as torch's FlexAttention takes it: blocks that are skipped whole."""

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def flex_mask(
    segment_ids: Tensor,
    position_ids: Tensor,
    *,
    window: int | None = None,
    branch_ids: Tensor | None = None,
) -> BlockMask:
    """What :func:`~dschat_lora.algos.segments.block_causal_mask` lets through, made once a batch.

    Args:
        segment_ids: (B, T) int64, as there; so are all.
        position_ids: (B, T) int64.
        window: positions that a sliding window spans; None: all.
        branch_ids: (B, T) int64 or None.
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
