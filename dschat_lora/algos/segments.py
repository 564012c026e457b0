"""Layout of a batch: masks and spans of packed rows, and the copy of tensors to a device."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# Tokens of a sample: of the prefix that its branches share, then of each branch. A sample that is
# one sequence has the first number alone.
Sizes = tuple[int, ...]
SizeT = TypeVar("SizeT", int, NDArray[np.int64])
BATCH_FILL = 0.75  # least length of a sequence beside the longest one of its batch


@dataclass(frozen=True)
class Spans:
    """Offsets of the sequences of a batch, computed on the host once for all layers.

    The N tokens that are no padding are numbered row after row. A sample's shared prefix and
    first branch are one sequence; each further branch, if any, is another one, whose keys are
    those of the prefix and its own. In each of the S sequences the queries are the last of the
    keys, so that causal attention is the same for all.
    """

    lengths: tuple[tuple[int, int], ...]  # queries and keys of each sequence
    longest: tuple[int, int]  # largest number of each
    query_ends: Tensor  # (S + 1,) int32: 0, and tokens up to each sequence's end
    key_ends: Tensor  # (S + 1,) int32, likewise of keys
    keys: Tensor | None  # (K,) int64 in [0, N), keys of all sequences; None: their own tokens
    places: Tensor | None  # (N,) int64 in the flattened (B T) positions; None: there is no padding
    context: Any = None  # the group of ranks that divide the tokens among them; None: all are here
    # (N,) int64: tokens of one sequence and one number see later ones too, but for those of 0; of a
    # number below 0 in layers with a sliding window alone. None: no token sees later ones.
    mutual: Tensor | None = None

    def to(self, device: torch.device | str) -> "Spans":
        """The same spans with tensors on ``device``."""
        tensors: dict[str, Any] = {
            f.name: to_device(value, device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    @cached_property
    def batches(self) -> tuple[list[Tensor], Tensor]:
        """Sequences as right-padded batches of similar lengths, for layers that know no spans.

        Returns:
            (rows, width) int64 tokens of each batch in [0, N), a sequence's last key again as
            padding; and (N,) int64, where the flattened outputs of all batches, one after another,
            have each token.
        """
        device = self.query_ends.device
        starts = [0, *accumulate(keys for _, keys in self.lengths)]
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i][1])
        batches: list[Tensor] = []
        places = [torch.empty(0, dtype=torch.int64)] * len(order)
        first = computed = 0
        while first < len(order):
            width = self.lengths[order[first]][1]
            rows = [i for i in order[first:] if self.lengths[i][1] > BATCH_FILL * width]
            for row, i in enumerate(rows):
                queries, keys = self.lengths[i]
                places[i] = computed + row * width + torch.arange(keys - queries, keys)
            last = torch.tensor([[self.lengths[i][1] - 1] for i in rows])
            tokens = torch.tensor([[starts[i]] for i in rows]) + torch.arange(width).minimum(last)
            tokens = to_device(tokens, device)
            batches.append(tokens if self.keys is None else self.keys[tokens])
            first, computed = first + len(rows), computed + len(rows) * width
        return batches, to_device(torch.cat(places), device)


def make_spans(rows: Sequence[Sequence[Sizes]], width: int) -> Spans:
    """The spans of a batch from the samples of each row, which is ``width`` positions long."""
    lengths: list[tuple[int, int]] = []
    keys: list[Tensor] = []
    start = 0
    for shared, *branches in (sizes for row in rows for sizes in row):
        own = torch.arange(start, start + shared + sum(branches))
        first = shared + sum(branches[:1])
        backbone, *others = torch.split(own, [first, *branches[1:]])
        lengths.append((first, first))
        keys.append(backbone)
        for branch in others:
            if len(branch):
                lengths.append((len(branch), shared + len(branch)))
                keys += [backbone[:shared], branch]
        start += len(own)
    filled = [sum(map(sum, row)) for row in rows]
    is_full = all(n == width for n in filled)
    places = [torch.arange(r * width, r * width + n) for r, n in enumerate(filled)]
    queries_of, keys_of = zip(*lengths, strict=True) if lengths else ((), ())
    return Spans(
        lengths=tuple(lengths),
        longest=(max(queries_of, default=0), max(keys_of, default=0)),
        query_ends=_ends(queries_of),
        key_ends=_ends(keys_of),
        keys=None if queries_of == keys_of else torch.cat(keys),
        places=None if is_full else torch.cat(places),
    )


def lengthened(spans: Spans, extra: int) -> Spans:
    """The spans with one more sequence at the end, of ``extra`` tokens that are in no row."""
    if not extra:
        return spans
    tokens, keys = sum(n for n, _ in spans.lengths), spans.keys
    if keys is not None:
        keys = torch.cat([keys, torch.arange(tokens, tokens + extra, device=keys.device)])
    return replace(
        spans,
        lengths=(*spans.lengths, (extra, extra)),
        longest=(max(spans.longest[0], extra), max(spans.longest[1], extra)),
        query_ends=torch.cat([spans.query_ends, spans.query_ends[-1:] + extra]),
        key_ends=torch.cat([spans.key_ends, spans.key_ends[-1:] + extra]),
        keys=keys,
        mutual=None if spans.mutual is None else nn.functional.pad(spans.mutual, (0, extra)),
    )


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def find_spans(segment_ids: Tensor, branch_ids: Tensor | None = None) -> Spans:
    """The spans of a batch from its segment ids, on its device; waits for the device.

    Arguments are as for :func:`block_causal_mask`; padding is on the right, and ``branch_ids``
    ascend within a sample.
    """
    segments = segment_ids.cpu()
    branches = torch.zeros_like(segments) if branch_ids is None else branch_ids.cpu()
    most = int(branches.max()) + 1
    rows: list[list[Sizes]] = []
    for segment, branch in zip(segments, branches, strict=True):
        real = segment > 0
        samples, sample = torch.unique_consecutive(segment[real], return_inverse=True)
        counts = torch.bincount(most * sample + branch[real], minlength=most * len(samples))
        rows.append([tuple(sizes) for sizes in counts.view(-1, most).tolist()])
    return make_spans(rows, segment_ids.shape[1]).to(segment_ids.device)


def causal_pairs(size: SizeT) -> SizeT:
    """(query, key) pairs of causal attention over ``size`` tokens."""
    return size * (size + 1) // 2


def block_causal_mask(
    segment_ids: Tensor,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    branch_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Additive block-diagonal causal mask: each position attends within its own sample.

    Given to the model explicitly: some architectures do not derive it from position ids and
    would mix the samples of a row. Where a sample is a tree (a prefix and branches, one after
    another in the row), each branch attends to the prefix and itself, never to the others.

    Args:
        segment_ids: (B, T) int64, the sample each position belongs to, 0 on padding.
        dtype: compute type of the model.
        window: positions that a sliding window spans, the query's own included; None: all.
        branch_ids: (B, T) int64, 0 on a sample's shared prefix, else the number of the branch;
            None where every sample is one sequence.
        position_ids: (B, T) int64, within the sequence; needed for the window of a tree, whose
            later branches are further from the prefix in the row.

    Returns:
        (B, 1, T, T) of ``dtype``: 0 where query (row) attends to key (column), else the most
        negative finite number. Padding attends to padding, so that no row is empty.
    """
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    hidden = segment_ids[:, :, None] != segment_ids[:, None, :]
    hidden |= places[:, None] < places
    if branch_ids is not None:
        key = branch_ids[:, None, :]
        hidden |= (key != 0) & (key != branch_ids[:, :, None])
    if window is not None:
        at = places[None] if position_ids is None else position_ids
        hidden |= at[:, :, None] >= at[:, None, :] + window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=segment_ids.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``, by way of pinned memory to a GPU.

    From memory that can be paged out CUDA copies only while the host waits, whatever
    ``non_blocking`` says.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
