from dataclasses import fields

import numpy as np
import pytest
import torch

from dschat_lora.algos.segments import find_spans
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.samples import SequenceSample
from helpers.pairs import ragged_pairs, with_a_prefix

I = -100  # noqa: E741 - short, so that the rows below line up


def sample(ids, labels):
    return SequenceSample.of(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))


A = sample([5, 6, 7], [I, 6, 7])
B = sample([8, 9], [8, 9])
C = sample([4], [I])


def test_the_original_golden_of_e2e_is_supervised_from_the_sign_before_the_text():
    """16 tokens of meaning and sign, 21 of text and end; microsoft/LoRA's mask begins at 15."""
    ids = np.arange(37, dtype=np.int32)
    labels = np.where(ids < 16, I, ids)
    batch = SampleCollator(0)([[sample(ids, labels)]])
    assert batch.logit_positions.tolist() == list(range(15, 36))
    assert batch.target_ids.tolist() == list(range(16, 37))
    assert batch.num_targets == 21


def test_a_packed_batch_by_hand():
    batch = SampleCollator(3)([[A, B], [C]])
    expected = {
        "input_ids": [[5, 6, 7, 8, 9], [4, 3, 3, 3, 3]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]],
        # the first token of B would be predicted from A
        "logit_positions": [0, 1, 3],
        "target_ids": [6, 7, 9],
    }
    for name, rows in expected.items():
        torch.testing.assert_close(getattr(batch, name), torch.tensor(rows))
    assert batch.num_targets == 3
    assert batch.num_tokens == 6
    assert batch.num_samples == 3
    assert batch.num_attended == (1 + 2 + 3) + (1 + 2) + 1
    assert batch.spans.lengths == ((3, 3), (2, 2), (1, 1))
    assert batch.spans.places.tolist() == [0, 1, 2, 3, 4, 5]


def test_padding_is_told_by_segment_even_where_ids_equal_it():
    batch = SampleCollator(3)([[sample([2, 3], [I, 3])], [A]])
    assert batch.segment_ids[0].tolist() == [1, 1, 0]
    assert batch.logit_positions.tolist() == [0, 3, 4]
    assert batch.target_ids.tolist()[0] == 3
    assert batch.num_targets == 3


def test_the_width_can_be_rounded_up():
    assert SampleCollator(0, multiple_of=8)([[A, B]]).input_ids.shape == (1, 8)
    assert SampleCollator(0, multiple_of=5)([[A, B]]).input_ids.shape == (1, 5)


def test_counts_agree_with_the_tensors_of_a_random_batch():
    rng = np.random.default_rng(0)
    rows = [[_random_sample(rng) for _ in range(rng.integers(1, 4))] for _ in range(5)]
    batch = SampleCollator(0)(rows)
    wanted, attended = [], 0
    for row in range(5):
        start = row * batch.input_ids.shape[1]
        for each in rows[row]:
            # Labels of first tokens are there in half of the samples, and mean nothing.
            steps = [t for t in range(1, len(each.labels)) if each.labels[t] != I]
            wanted += [(start + t - 1, int(each.input_ids[t])) for t in steps]
            start += len(each.labels)
        for t in range(batch.segment_ids.shape[1]):
            segment = batch.segment_ids[row, t]
            if segment > 0:
                attended += int((batch.segment_ids[row, : t + 1] == segment).sum())
    assert batch.num_attended == attended
    found = zip(batch.logit_positions.tolist(), batch.target_ids.tolist(), strict=True)
    assert list(found) == wanted
    assert batch.num_targets == len(wanted)
    assert batch.num_tokens == int((batch.segment_ids > 0).sum())


def _random_sample(rng):
    ids = rng.integers(1, 50, rng.integers(1, 7))
    return sample(ids, np.where(rng.random(len(ids)) < 0.5, ids, I))


def test_an_empty_batch_has_a_shape_and_nothing_else():
    batch = SampleCollator(7).empty()
    assert batch.input_ids.tolist() == [[7]]
    assert batch.logit_positions.tolist() == batch.target_ids.tolist() == []
    assert batch.target_ids.dtype == torch.int64
    assert batch.segment_ids.tolist() == batch.position_ids.tolist() == [[0]]
    counts = (batch.num_targets, batch.num_tokens, batch.num_samples, batch.num_attended)
    assert counts == (0, 0, 0, 0)
    assert batch.input_ids.dtype == torch.int64
    assert batch.spans.lengths == ()


def test_moving_a_batch_moves_its_tensors_and_keeps_its_counts():
    moved = SampleCollator(0)([[A]]).to("meta")
    tensors = (moved.input_ids, moved.position_ids, moved.logit_positions, moved.target_ids)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.num_tokens == 3
    assert moved.spans.key_ends.is_meta
    assert moved.spans.longest == (3, 3)


@pytest.mark.parametrize("layout", ["shared", "separate", "alone"])
@pytest.mark.parametrize("tight", [False, True])
def test_spans_of_pairs_are_where_their_tokens_are(layout, tight):
    pairs = [each.sample() for each in [*ragged_pairs(5), *with_a_prefix()]]
    rows = [[each] for each in pairs] if layout == "alone" else [pairs[:1], pairs[1:5], pairs[5:]]
    batch = PairCollator(0, layout, tight=tight)(rows)
    found = find_spans(batch.segment_ids, batch.branch_ids)
    for field in fields(found):
        value, expected = getattr(batch.spans, field.name), getattr(found, field.name)
        if isinstance(expected, torch.Tensor):
            assert value.tolist() == expected.tolist()
        else:
            assert value == expected
