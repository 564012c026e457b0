"""Collators: rows of samples or pairs as one padded batch of tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dschat_lora.algos.segments import (
    Sizes,
    Spans,
    causal_pairs,
    lengthened,
    make_spans,
    to_device,
)
from dschat_lora.data.packing import SampleCounts, first_fit, round_up
from dschat_lora.data.samples import PairSample, SequenceSample, TokenSet

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BatchT = TypeVar("BatchT", bound="DataclassInstance")
# The two sequences of a pair: as one tree, one after the other in a row, or a row each.
PairLayout = Literal["shared", "separate", "alone"]
_COUNTS = ("num_targets", "num_tokens", "num_samples", "num_attended", "num_chosen_targets")


@dataclass(frozen=True)
class Batch:
    """Rows of one or several samples each, right-padded. Counts are over the whole batch."""

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64, from 0 within each sample; 0 on padding
    segment_ids: Tensor  # (B, T) int64, 1, 2, ... per sample of the row; 0 on padding
    logit_positions: Tensor  # (N,) int64 into the flattened (B T), one before the predicted token
    target_ids: Tensor  # (N,) int64 tokens
    spans: Spans  # of the samples
    num_targets: int  # N, supervised predictions
    num_tokens: int  # without padding
    num_samples: int
    num_attended: int  # (query, key) pairs of causal attention within samples
    num_chosen_targets: int = 0  # of samples there are none
    source_ids: Tensor | None = None  # (N,) int64 of targets, where metrics tell sources apart
    num_sources: int = 0  # of which these are

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on ``device``."""
        return batch_to_device(self, device)


@dataclass(frozen=True)
class PairBatch:
    """Rows of pairs. The sequences of the P pairs are numbered chosen first, then rejected.

    A place is an index into the flattened (B T) positions. The logits at ``logit_positions[k]``
    predict the answer token ``target_ids[k]`` of sequence ``owner[k]``.
    """

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64, position in its sequence; 0 on padding
    segment_ids: Tensor  # (B, T) int64, 1, 2, ... per tree or sequence of the row; 0 on padding
    branch_ids: Tensor  # (B, T) int64, 0 where a tree's sequences are one, then 1 and 2
    ends: Tensor  # (2 P,) int64 place of each sequence's last token
    answer_lengths: Tensor  # (2 P,) int64 predicted tokens of each answer
    logit_positions: Tensor  # (N,) int64 places
    target_ids: Tensor  # (N,) int64 tokens
    owner: Tensor  # (N,) int64 in [0, 2 P)
    compared: Tensor  # (2, M) int64 places of tokens at the same step of two diverged answers
    compared_pair: Tensor  # (M,) int64 in [0, P)
    margins: Tensor  # (P,) float32
    reference: Tensor  # (2 P,) float32 reference log-probabilities; NaN where not known
    spans: Spans  # of the trees or sequences
    num_targets: int  # N
    num_tokens: int
    num_samples: int  # P
    num_attended: int
    num_chosen_targets: int  # of the chosen answers

    def to(self, device: torch.device | str) -> "PairBatch":
        """The same batch on ``device``."""
        return batch_to_device(self, device)


@dataclass(frozen=True)
class SampleCollator:
    """Batches of samples, one after another in their rows."""

    pad_id: int  # of padding, which segment 0 marks: nothing reads it
    multiple_of: int = 1  # width is rounded up to it
    context: "Sharing | None" = None  # ranks that divide the tokens among them, if any do
    num_sources: int = 0  # of samples, if batches are to say of which one a target is

    def __call__(self, rows: Sequence[Sequence[SequenceSample]]) -> Batch:
        """One batch row per element of ``rows``, none of which is empty.

        Nothing predicts a sample's first token, whatever its label: in a packed row that would
        be another sample.
        """
        sizes = [[len(sample.input_ids) for sample in row] for row in rows]
        grid = PaddedRows(*self.shape([sum(row) for row in sizes]), self.pad_id)
        logit_positions, target_ids, source_ids = [], [], []
        for index, row in enumerate(rows):
            for sample in row:
                size = len(sample.input_ids)
                start = grid.put(index, sample.input_ids, np.arange(size), (size,))
                # The logits of a token's predecessor predict it.
                (steps,) = np.nonzero(sample.supervised[1:])
                logit_positions.append(index * grid.shape[1] + start + steps)
                target_ids.append(sample.input_ids[1:][steps].astype(np.int64))
                source_ids.append(np.full(len(steps), sample.source))
        lengths = [size for row in sizes for size in row]
        batch = Batch(
            input_ids=torch.from_numpy(grid.input_ids),
            position_ids=torch.from_numpy(grid.positions),
            segment_ids=torch.from_numpy(grid.segments),
            logit_positions=_integers(logit_positions),
            target_ids=_integers(target_ids),
            spans=grid.spans(),
            num_targets=sum(map(len, target_ids)),
            num_tokens=sum(lengths),
            num_samples=len(lengths),
            num_attended=sum(map(causal_pairs, lengths)),
            source_ids=_integers(source_ids) if self.num_sources else None,
            num_sources=self.num_sources,
        )
        return own_tokens(batch, self.context)

    def empty(self) -> Batch:
        """One row of one padding token."""
        zero = torch.zeros(1, 1, dtype=torch.int64)
        none, spans = _integers([]), make_spans([[]], 1)
        batch = Batch(zero + self.pad_id, zero, zero, none, none, spans, 0, 0, 0, 0)
        sources = none if self.num_sources else None
        return replace(batch, source_ids=sources, num_sources=self.num_sources)

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(B, T) of the batch of rows of these lengths."""
        return len(lengths), round_up(max(lengths), self.multiple_of)

    def positions(self, samples: TokenSet) -> NDArray[np.int64]:
        """(len(samples),) positions of a row for each sample alone; labels are not read."""
        return samples.lengths

    def counts(self, samples: TokenSet) -> SampleCounts:
        """Counts of each sample."""
        tokens, targets = samples.lengths, [np.zeros(0, np.int64)]
        for offsets, runs in samples.lists("runs"):
            # Every other run is supervised, those of odd places in their sample.
            within = np.arange(len(runs)) - np.repeat(offsets[:-1], np.diff(offsets))
            before = np.concatenate([[0], np.cumsum(np.where(within % 2, runs, 0))])
            targets.append(before[offsets[1:]] - before[offsets[:-1]])
        learnt, none = np.concatenate(targets), np.zeros_like(tokens)
        return SampleCounts(tokens, learnt, causal_pairs(tokens), tokens, none)


class Sharing(Protocol):
    """Ranks that divide the tokens of a batch among them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


def own_tokens(batch: BatchT, context: Sharing | None) -> BatchT:
    """A rank's share of the tokens of all rows, one row after another without padding.

    ``context`` is the group of ranks; None: the batch as it is. All get
    as many tokens, the last ones perhaps padding. A target is on the rank of the token that
    predicts it, and ``ends`` and ``compared`` are -1 where the token is another rank's. All else,
    such as spans, is that of the whole batch on every rank, but counts, which the first has.
    """
    if context is None:
        return batch
    values = vars(batch)
    spans: Spans = values["spans"]
    tokens, places = sum(n for n, _ in spans.lengths), spans.places
    padding = -tokens % context.size
    size = (tokens + padding) // context.size
    first = size * context.rank

    def own(values: Tensor) -> Tensor:
        real = values.flatten() if places is None else values.flatten()[places]
        return nn.functional.pad(real, (0, padding))[None, first : first + size]

    def here(tokens_at: Tensor) -> Tensor:
        tokens_at = (tokens_at if places is None else torch.searchsorted(places, tokens_at)) - first
        return tokens_at.where((tokens_at >= 0) & (tokens_at < size), -1)

    steps = here(values["logit_positions"])
    changed: dict[str, Any] = {
        "logit_positions": steps[steps >= 0],
        "spans": replace(lengthened(spans, padding), places=None, context=context),
    }
    for name, value in values.items():
        if name in ("input_ids", "position_ids", "segment_ids", "branch_ids"):
            changed[name] = own(value)
        elif name in ("target_ids", "owner", "source_ids") and value is not None:
            changed[name] = value[steps >= 0]
        elif name in ("ends", "compared"):
            changed[name] = here(value)
        elif name in _COUNTS and context.rank > 0:
            changed[name] = 0
    return replace(batch, **changed)


# Tokens of a tree, or of one sequence, and their numbers.
_Piece = tuple[NDArray[np.int32], Sizes]


@dataclass(frozen=True)
class PairCollator:
    """Batches of pairs.

    Layout ``shared`` stores a pair as its common prefix, then the rest of the chosen and the rest
    of the rejected sequence, whose positions both continue the prefix; ``separate`` as two
    sequences in a row; ``alone`` gives each a row of its own. If ``tight``, short rows are joined
    up to the width of the longest one, to save padding; the pairs keep their numbers.
    """

    pad_id: int
    layout: PairLayout
    multiple_of: int = 1  # width is rounded up to it
    tight: bool = False
    context: "Sharing | None" = None  # ranks that divide the tokens among them, if any do

    def __call__(self, rows: Sequence[Sequence[PairSample]]) -> PairBatch:
        """One batch row per element of ``rows``, or one per sequence of its only pair."""
        pairs = [pair for row in rows for pair in row]
        pieces = [[piece for pair in row for piece in self._pieces(pair)] for row in rows]
        moved = [[index] * len(row) for index, row in enumerate(pieces)]  # to which batch row
        if self.layout == "alone":
            assert all(len(row) == 1 for row in rows), "a row of its own holds one sequence"
            moved = [[2 * index, 2 * index + 1] for index in range(len(rows))]
        elif self.tight:
            totals = [sum(len(ids) for ids, _ in row) for row in pieces]
            for index, members in enumerate(first_fit(np.array(totals), max(totals))):
                for row in members:
                    moved[row] = [index] * len(pieces[row])
        row_of, flat = list(chain.from_iterable(moved)), list(chain.from_iterable(pieces))
        filled = [0] * (max(row_of) + 1)
        for row, (ids, _) in zip(row_of, flat, strict=True):
            filled[row] += len(ids)
        grid = PaddedRows(len(filled), round_up(max(filled), self.multiple_of), self.pad_id)
        paths = [
            path
            for row, piece in zip(row_of, flat, strict=True)
            for path in grid.put_tree(row, *piece)
        ]
        return own_tokens(_pair_batch(grid, pairs, paths, flat), self.context)

    def empty(self) -> PairBatch:
        """One row of one padding token, and no pair."""
        return _pair_batch(PaddedRows(1, 1, self.pad_id), [], [], [])

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(B, T) of the batch of rows of these lengths."""
        height, width = len(lengths), max(lengths)
        if self.layout == "alone":
            height, width = 2 * height, width // 2
        elif self.tight:
            height = len(first_fit(np.array(lengths), width))
        return height, round_up(width, self.multiple_of)

    def positions(self, pairs: TokenSet) -> NDArray[np.int64]:
        """(len(pairs),) positions of a row for each pair alone, padding included."""
        return self.counts(pairs).positions

    def counts(self, pairs: TokenSet) -> SampleCounts:
        """Counts of each pair in this layout; nothing predicts the first token of a sequence."""
        names = ("prompt_length", "shared_length", "chosen_length")
        prompt, shared, first = (pairs.column(name).astype(np.int64) for name in names)
        tree = pairs.lengths
        chosen, rejected = shared + first, tree - first
        unanswered = np.maximum(1, prompt)
        answered = np.maximum(0, chosen - unanswered)
        targets = answered + np.maximum(0, rejected - unanswered)
        attended = causal_pairs(chosen) + causal_pairs(rejected)
        if self.layout == "shared":
            return SampleCounts(tree, targets, attended - causal_pairs(shared), tree, answered)
        tokens = tree + shared  # of both sequences, whole
        positions = 2 * np.maximum(chosen, rejected) if self.layout == "alone" else tokens
        return SampleCounts(tokens, targets, attended, positions, answered)

    def _pieces(self, pair: PairSample) -> list[_Piece]:
        if self.layout == "shared":
            ids, shared = pair.input_ids, pair.shared_length
            rest = len(ids) - shared - pair.chosen_length
            return [(ids, (shared, pair.chosen_length, rest) if shared < len(ids) else (shared,))]
        return [(ids, (len(ids),)) for ids in (pair.chosen, pair.rejected)]


class PaddedRows:
    """Arrays (B, T) of a batch, filled row by row from the left."""

    def __init__(self, rows: int, width: int, pad_id: int) -> None:
        self.shape = rows, width
        self.input_ids, self.positions, self.segments, self.branches = (
            np.full(self.shape, value, dtype=np.int64) for value in (pad_id, 0, 0, 0)
        )
        self._filled = [0] * rows
        self._samples: list[list[Sizes]] = [[] for _ in range(rows)]

    def put(
        self, row: int, ids: NDArray[np.int32], positions: NDArray[np.int64], sizes: Sizes
    ) -> int:
        """Append a sample to a row; returns the column where it begins."""
        start = self._filled[row]
        end = self._filled[row] = start + len(ids)
        self.input_ids[row, start:end] = ids
        self.positions[row, start:end] = positions
        self._samples[row].append(sizes)
        self.segments[row, start:end] = len(self._samples[row])
        return start

    def put_tree(self, row: int, ids: NDArray[np.int32], sizes: Sizes) -> list[NDArray[np.int64]]:
        """Append a tree to a row; returns the places of each sequence's tokens.

        ``ids`` are the prefix, then the branches, of so many tokens each; without branches, the
        prefix is the one sequence.
        """
        shared, *branches = sizes
        steps = [np.arange(shared), *(shared + np.arange(size) for size in branches)]
        start = self.put(row, ids, np.concatenate(steps), sizes)
        self.branches[row, start : start + len(ids)] = np.repeat(np.arange(len(sizes)), sizes)
        places = row * self.shape[1] + start + np.arange(len(ids))
        prefix, *others = np.split(places, np.cumsum(sizes)[:-1])
        return [np.concatenate([prefix, branch]) for branch in others] or [prefix]

    def spans(self) -> Spans:
        """The spans of all samples."""
        return make_spans(self._samples, self.shape[1])


def _pair_batch(
    grid: PaddedRows,
    pairs: Sequence[PairSample],
    paths: Sequence[NDArray[np.int64]],
    pieces: Sequence[_Piece],
) -> PairBatch:
    """The batch of ``pairs``; ``paths`` are the places of each sequence's tokens, pair by pair."""
    sequences = [*paths[::2], *paths[1::2]]
    tokens = grid.input_ids.reshape(-1)
    prompts = [pair.prompt_length for pair in pairs] * 2
    # The logits of a token's predecessor predict it; nothing predicts a sequence's first.
    steps = [np.arange(max(1, n), len(path)) for n, path in zip(prompts, sequences, strict=True)]
    along = list(zip(sequences, steps, strict=True))
    compared = [
        np.stack([chosen[pair.shared_length : end], rejected[pair.shared_length : end]])
        for pair, chosen, rejected in zip(pairs, paths[::2], paths[1::2], strict=True)
        for end in [min(len(chosen), len(rejected))]
    ]
    reference = [pair.reference[side] for side in (0, 1) for pair in pairs]
    return PairBatch(
        input_ids=torch.from_numpy(grid.input_ids),
        position_ids=torch.from_numpy(grid.positions),
        segment_ids=torch.from_numpy(grid.segments),
        branch_ids=torch.from_numpy(grid.branches),
        ends=_integers(path[-1:] for path in sequences),
        answer_lengths=_integers([np.array([len(step) for step in steps], dtype=np.int64)]),
        logit_positions=_integers(path[step - 1] for path, step in along),
        target_ids=_integers(tokens[path[step]] for path, step in along),
        owner=_integers(np.full(len(step), number) for number, step in enumerate(steps)),
        compared=torch.from_numpy(np.concatenate([np.zeros((2, 0), np.int64), *compared], axis=1)),
        compared_pair=_integers(
            np.full(each.shape[1], number) for number, each in enumerate(compared)
        ),
        margins=torch.tensor([pair.margin for pair in pairs], dtype=torch.float32),
        reference=torch.tensor(reference, dtype=torch.float32),
        spans=grid.spans(),
        num_targets=sum(map(len, steps)),
        num_tokens=sum(len(ids) for ids, *_ in pieces),
        num_samples=len(pairs),
        num_attended=sum(tree_pairs(sizes) for _, sizes in pieces),
        num_chosen_targets=sum(map(len, steps[: len(pairs)])),
    )


def _integers(arrays: Iterable[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *arrays]))


def tree_pairs(sizes: Sizes) -> int:
    """(query, key) pairs of a tree: each branch attends to what comes before it as well."""
    shared, *branches = sizes
    return causal_pairs(shared) + sum(n * shared + causal_pairs(n) for n in branches)


def batch_to_device(batch: BatchT, device: torch.device | str) -> BatchT:
    """The batch with its tensors and spans on ``device``."""
    moved: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = to_device(value, device)
        elif hasattr(value, "to"):  # spans, and batches within this one
            moved[field.name] = value.to(device)
    return replace(batch, **moved)
