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
