"""Batches of unpaired answers."""

import numpy as np
import pytest
import torch

from dschat_lora.addons.kto.batch import UnpairedCollator
from dschat_lora.data.samples import UnpairedSample

SAMPLES = [
    UnpairedSample(np.array([3, 4, 5, 6], np.int32), np.array([7], np.int32), 2, 1, (-1.0, -2.0)),
    UnpairedSample(np.array([8, 9], np.int32), np.array([5, 6, 7], np.int32), 1, 0, (-3.0, -4.0)),
    UnpairedSample(np.array([9, 9], np.int32), np.array([4, 4], np.int32), 0, 1, (-5.0, -6.0)),
]


def predicted(answers):
    """{answer: [(token before, token)]} of a batch."""
    tokens = answers.input_ids.flatten()
    found = {number: [] for number in range(len(answers.answer_lengths))}
    for position, target, owner in zip(
        answers.logit_positions, answers.target_ids, answers.owner, strict=True
    ):
        found[int(owner)].append((int(tokens[position]), int(target)))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_predicts_each_answer_and_each_mismatched_one(packed):
    batch = UnpairedCollator(0)([SAMPLES] if packed else [[each] for each in SAMPLES])
    # nothing predicts a sequence's first token
    assert predicted(batch.answers) == {0: [(4, 5), (5, 6)], 1: [(8, 9)], 2: [(9, 9)]}
    assert predicted(batch.mismatched) == {0: [(4, 7)], 1: [(8, 5), (5, 6), (6, 7)], 2: [(4, 4)]}
    assert batch.answers.answer_lengths.tolist() == [2, 1, 1]
    assert batch.mismatched.answer_lengths.tolist() == [1, 3, 1]
    assert batch.answers.reference.tolist() == [-1.0, -3.0, -5.0]
    assert batch.mismatched.reference.tolist() == [-2.0, -4.0, -6.0]
    assert batch.labels.tolist() == [True, False, True]
    assert (batch.num_samples, batch.num_tokens, batch.num_targets) == (3, 8, 4)
    assert batch.answers.input_ids.shape == batch.mismatched.input_ids.shape
    assert batch.answers.input_ids.shape[1] == (10 if packed else 4)


def test_a_batch_of_nothing_has_answers_of_nothing():
    batch = UnpairedCollator(0).empty()
    assert batch.labels.shape == (0,)
    for answers in (batch.answers, batch.mismatched):
        assert predicted(answers) == {}
        assert answers.input_ids.shape == (1, 1)


def test_a_batch_moves_whole():
    batch = UnpairedCollator(0)([SAMPLES]).to("meta")
    moved = [batch.labels, batch.answers.owner, batch.mismatched.input_ids]
    assert {each.device for each in moved} == {torch.device("meta")}
