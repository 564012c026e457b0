"""Token and attention counts of batches on all ranks, from their rows, without making them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.segments import causal_pairs
from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.packed_rows import PackedRow
from dschat_lora.data.packing import first_fit, round_up
from dschat_lora.data.store import TokenSet
from dschat_lora.data.unpaired_batch import UnpairedCollator

Integers = NDArray[np.int64]


class Samples(Protocol):
    """Samples or pairs by index: a ``TokenSet`` or a list."""

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class SampleCounts:
    """Counts of each sample or pair in its rows, (n,) int64."""

    tokens: Integers
    targets: Integers  # supervised predictions
    attended: Integers  # (query, key) pairs of causal attention
    positions: Integers  # of rows for this sample alone, padding included
    chosen_targets: Integers  # predictions of a pair's chosen answer, else 0


def count_samples(collate: object, samples: Samples, size: int) -> SampleCounts:
    """Counts of the first ``size`` samples in the rows of a collator.

    A ``TokenSet`` is counted column by column, others one by one.
    """
    if isinstance(collate, PairCollator):
        return _count_pairs(collate, samples, size)
    if isinstance(collate, UnpairedCollator):
        return _count_unpaired(collate, samples, size)
    tokens = _lengths(samples, size)
    none = np.zeros_like(tokens)
    return SampleCounts(tokens, _targets(samples, size), causal_pairs(tokens), tokens, none)


def _count_pairs(collate: PairCollator, pairs: Samples, size: int) -> SampleCounts:
    names = ("prompt_length", "shared_length", "chosen_length")
    prompt, shared, first = (_column(pairs, name, size) for name in names)
    tree = _lengths(pairs, size)
    tokens = tree + shared  # of both sequences, whole
    chosen, rejected = shared + first, tree - first
    # Nothing predicts the first token of a sequence.
    unanswered = np.maximum(1, prompt)
    answered = np.maximum(0, chosen - unanswered)
    targets = answered + np.maximum(0, rejected - unanswered)
    attended = causal_pairs(chosen) + causal_pairs(rejected)
    if collate.layout == "shared":
        return SampleCounts(tree, targets, attended - causal_pairs(shared), tree, answered)
    positions = 2 * np.maximum(chosen, rejected) if collate.layout == "alone" else tokens
    return SampleCounts(tokens, targets, attended, positions, answered)


def _count_unpaired(collate: UnpairedCollator, samples: Samples, size: int) -> SampleCounts:
    """Counts of the prompts with their own answers; positions are those of the longer answer."""
    tokens, prompt = _lengths(samples, size), _column(samples, "prompt_length", size)
    if isinstance(samples, TokenSet):
        longest = collate.lengths(samples)[:size]
    else:
        others = [len(samples[index].mismatched_ids) for index in range(size)]
        longest = np.maximum(tokens, prompt + np.array(others, dtype=np.int64))
    targets = np.maximum(0, tokens - np.maximum(1, prompt))
    return SampleCounts(tokens, targets, causal_pairs(tokens), longest, np.zeros_like(tokens))


def count_step(
    collate: object, counts: SampleCounts, batches: Sequence[Sequence[PackedRow]]
) -> dict[str, int]:
    """Counts of the batches that a collator makes of rows, by the names of ``StepCounts``.

    ``counts`` are those of every sample for this collator; a batch may have no rows.
    """
    step = list(chain.from_iterable(batches))
    samples = np.fromiter(chain.from_iterable(step), dtype=np.int64)
    lengths = iter(row_lengths(counts, step).tolist())
    shapes = [_shape(collate, list(islice(lengths, len(rows)))) for rows in batches]
    return {
        "num_samples": len(samples),
        "num_tokens": int(counts.tokens[samples].sum()),
        "num_targets": int(counts.targets[samples].sum()),
        "num_attended": int(counts.attended[samples].sum()),
        "num_positions": sum(height * width for height, width in shapes),
        "num_scored_pairs": sum(height * width**2 for height, width in shapes),
        "num_chosen_targets": int(counts.chosen_targets[samples].sum()),
    }


def row_lengths(counts: SampleCounts, rows: Sequence[PackedRow]) -> Integers:
    """(len(rows),) positions of each row; all at once, as every rank counts those of all ranks."""
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    samples = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    up_to = np.concatenate([[0], np.cumsum(counts.positions[samples])])
    return np.diff(up_to[ends], prepend=0)


def _shape(collate: object, lengths: Sequence[int]) -> tuple[int, int]:
    """(B, T) of a batch of rows of these lengths."""
    if not lengths:
        return 1, 1
    assert isinstance(collate, SampleCollator | PairCollator | UnpairedCollator)
    height, width = len(lengths), max(lengths)
    if isinstance(collate, PairCollator) and collate.layout == "alone":
        height, width = 2 * height, width // 2
    elif isinstance(collate, PairCollator) and collate.tight:
        height = len(first_fit(lengths, width))
    return height, round_up(width, collate.multiple_of)


def _lengths(samples: Samples, size: int) -> Integers:
    if isinstance(samples, TokenSet):
        return samples.lengths[:size]
    return np.array([len(samples[index].input_ids) for index in range(size)], dtype=np.int64)


def _column(samples: Samples, name: str, size: int) -> Integers:
    if isinstance(samples, TokenSet):
        return samples.column(name)[:size].astype(np.int64)
    return np.array([getattr(samples[index], name) for index in range(size)], dtype=np.int64)


def _targets(samples: Samples, size: int) -> Integers:
    """Labels that are not ignored; that of a sample's first token never counts."""
    if not isinstance(samples, TokenSet):
        each = (np.count_nonzero(samples[i].labels[1:] != IGNORE_INDEX) for i in range(size))
        return np.array(list(each), dtype=np.int64)
    parts = [np.zeros(0, np.int64)]
    for offsets, labels in samples.lists("labels"):
        before = np.concatenate([[0], np.cumsum(labels != IGNORE_INDEX)])
        # An empty sample has no first token to leave out.
        first = np.minimum(offsets[:-1] + 1, offsets[1:])
        parts.append(before[offsets[1:]] - before[first])
    return np.concatenate(parts)[:size]
