"""Batches of unpaired answers: prompts with their own answers, and with mismatched ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dschat_lora.algos.segments import Spans, causal_pairs
from dschat_lora.data.batch import Batch, SampleCollator, Sharing, batch_to_device, own_tokens
from dschat_lora.data.packing import SampleCounts, round_up
from dschat_lora.data.samples import SequenceSample, TokenSet, UnpairedSample


@dataclass(frozen=True)
class AnswerBatch:
    """Rows of P prompts with an answer each; the fields are those of ``PairBatch``."""

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64
    segment_ids: Tensor  # (B, T) int64
    branch_ids: Tensor  # (B, T) int64, 0
    logit_positions: Tensor  # (N,) int64
    target_ids: Tensor  # (N,) int64
    owner: Tensor  # (N,) int64 in [0, P)
    answer_lengths: Tensor  # (P,) int64 predicted tokens of each answer
    reference: Tensor  # (P,) float32 reference log-probabilities; NaN where not known
    spans: Spans

    def to(self, device: torch.device | str) -> "AnswerBatch":
        """The same batch on ``device``."""
        return batch_to_device(self, device)


@dataclass(frozen=True)
class UnpairedBatch:
    """P samples; counts are of the prompts with their own answers."""

    answers: AnswerBatch
    mismatched: AnswerBatch  # each prompt with an answer to another one
    labels: Tensor  # (P,) bool, True where the answer is desirable
    num_targets: int
    num_tokens: int
    num_samples: int  # P
    num_attended: int
    num_chosen_targets: int = 0  # there are no pairs

    @property
    def input_ids(self) -> Tensor:
        """(B, T) of the prompts with their own answers."""
        return self.answers.input_ids

    def to(self, device: torch.device | str) -> "UnpairedBatch":
        """The same batch on ``device``."""
        return batch_to_device(self, device)


@dataclass(frozen=True)
class UnpairedCollator:
    """Batches of unpaired samples, one after another in their rows."""

    pad_id: int
    multiple_of: int = 1  # width is rounded up to it
    context: Sharing | None = None  # ranks that divide the tokens among them, if any do

    def __call__(self, rows: Sequence[Sequence[UnpairedSample]]) -> UnpairedBatch:
        """One row per element of ``rows``, in both batches, which are equally wide."""
        sides = [[[_supervised(each, side) for each in row] for row in rows] for side in (0, 1)]
        longest = max(sum(max(_lengths(sample)) for sample in row) for row in rows)
        # No row is longer than this width, so it is what a batch is rounded up to.
        collate = SampleCollator(self.pad_id, round_up(longest, self.multiple_of))
        own, other = (collate(side) for side in sides)
        samples = [sample for row in rows for sample in row]
        counted = own_tokens(own, self.context)
        return UnpairedBatch(
            own_tokens(_answers(own, samples, side=0), self.context),
            own_tokens(_answers(other, samples, side=1), self.context),
            torch.tensor([bool(sample.label) for sample in samples]),
            num_targets=counted.num_targets,
            num_tokens=counted.num_tokens,
            num_samples=counted.num_samples,
            num_attended=counted.num_attended,
        )

    def empty(self) -> UnpairedBatch:
        """One row of one padding token, and no sample."""
        nothing = SampleCollator(self.pad_id).empty()
        own, other = (_answers(nothing, [], side=side) for side in (0, 1))
        return UnpairedBatch(own, other, torch.zeros(0, dtype=torch.bool), 0, 0, 0, 0)

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(B, T) of the batch of rows of these lengths."""
        return SampleCollator(self.pad_id, self.multiple_of).shape(lengths)

    def positions(self, samples: TokenSet) -> NDArray[np.int64]:
        """(len(samples),) positions of a row for each sample alone: those of the longer answer."""
        return self.counts(samples).positions

    def counts(self, samples: TokenSet) -> SampleCounts:
        """Counts of the prompts with their own answers; positions are those of the longer one."""
        tokens, prompt = samples.lengths, samples.column("prompt_length").astype(np.int64)
        parts = [np.diff(offsets) for offsets, _ in samples.lists("mismatched_ids")]
        longer = np.maximum(tokens, prompt + np.concatenate([np.zeros(0, np.int64), *parts]))
        targets = np.maximum(0, tokens - np.maximum(1, prompt))
        return SampleCounts(tokens, targets, causal_pairs(tokens), longer, np.zeros_like(tokens))


def _lengths(sample: UnpairedSample) -> tuple[int, int]:
    """Tokens of the prompt with its own answer and with the mismatched one."""
    return len(sample.input_ids), sample.prompt_length + len(sample.mismatched_ids)


def _supervised(sample: UnpairedSample, side: int) -> SequenceSample:
    """The prompt with its own answer or with the mismatched one, which is supervised."""
    ids = sample.mismatched if side else sample.input_ids
    before = max(1, sample.prompt_length)
    return SequenceSample(ids, (before, len(ids) - before))


def _answers(batch: Batch, samples: Sequence[UnpairedSample], *, side: int) -> AnswerBatch:
    """The batch with its tokens' owners; nothing predicts a sequence's first token."""
    predicted = [_lengths(sample)[side] - max(1, sample.prompt_length) for sample in samples]
    lengths = torch.tensor(predicted, dtype=torch.int64)
    reference = [sample.reference[side] for sample in samples]
    return AnswerBatch(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        branch_ids=torch.zeros_like(batch.segment_ids),
        logit_positions=batch.logit_positions,
        target_ids=batch.target_ids,
        owner=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        answer_lengths=lengths,
        reference=torch.tensor(reference, dtype=torch.float32),
        spans=batch.spans,
    )
