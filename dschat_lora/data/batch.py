"""Rows of samples to one padded batch of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.data.tokenize import Sample


@dataclass(frozen=True)
class Batch:
    """Rows of one or several samples each, right-padded. Counts are over the whole batch."""

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64, from 0 within each sample; 0 on padding
    segment_ids: Tensor  # (B, T) int64, 1, 2, ... per sample of the row; 0 on padding
    labels: Tensor  # (B, T) int64, IGNORE_INDEX where no loss is taken, not shifted
    num_targets: int  # supervised predictions
    num_tokens: int  # without padding
    num_samples: int
    num_attended: int  # (query, key) pairs of causal attention within samples

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on ``device``."""
        names = ("input_ids", "position_ids", "segment_ids", "labels")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)


def collate(rows: Sequence[Sequence[Sample]], pad_id: int, *, multiple_of: int = 1) -> Batch:
    """One batch row per element of ``rows``, its samples one after another.

    The label of a sample's first token is ignored whatever the sample says: in a packed row
    it would be predicted from another sample.

    Args:
        rows: samples of each row; none is empty.
        pad_id: what padding holds. Nothing reads it: segment 0 is what marks padding.
        multiple_of: width is rounded up to it.
    """
    longest = max(sum(len(sample.input_ids) for sample in row) for row in rows)
    width = -(-longest // multiple_of) * multiple_of
    input_ids, positions, segments, labels = (
        np.full((len(rows), width), value, dtype=np.int64) for value in (pad_id, 0, 0, IGNORE_INDEX)
    )
    for index, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row, start=1):
            end = start + len(sample.input_ids)
            input_ids[index, start:end] = sample.input_ids
            positions[index, start:end] = np.arange(end - start)
            segments[index, start:end] = segment
            labels[index, start + 1 : end] = sample.labels[1:]
            start = end
    sizes = [len(sample.input_ids) for row in rows for sample in row]
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        position_ids=torch.from_numpy(positions),
        segment_ids=torch.from_numpy(segments),
        labels=torch.from_numpy(labels),
        num_targets=int((labels != IGNORE_INDEX).sum()),
        num_tokens=sum(sizes),
        num_samples=len(sizes),
        num_attended=sum(size * (size + 1) // 2 for size in sizes),
    )


def empty_batch(pad_id: int) -> Batch:
    """One row of one padding token: a rank without rows still takes part in the forward pass."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    return Batch(zero + pad_id, zero, zero, zero + IGNORE_INDEX, 0, 0, 0, 0)
