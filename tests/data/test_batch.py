import numpy as np
import torch

from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.tokenize import Sample

I = -100  # noqa: E741 - short, so that the rows below line up


def sample(ids, labels):
    return Sample(np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32))


A = sample([5, 6, 7], [I, 6, 7])
B = sample([8, 9], [8, 9])
C = sample([4], [I])


def test_a_packed_batch_by_hand():
    batch = SampleCollator(3)([[A, B], [C]])
    expected = {
        "input_ids": [[5, 6, 7, 8, 9], [4, 3, 3, 3, 3]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]],
        # the first token of B would be predicted from A
        "labels": [[I, 6, 7, I, 9], [I, I, I, I, I]],
    }
    for name, rows in expected.items():
        torch.testing.assert_close(getattr(batch, name), torch.tensor(rows))
    assert batch.num_targets == 3
    assert batch.num_tokens == 6
    assert batch.num_samples == 3
    assert batch.num_attended == (1 + 2 + 3) + (1 + 2) + 1


def test_padding_is_told_by_segment_even_where_ids_equal_it():
    batch = SampleCollator(3)([[sample([2, 3], [I, 3])], [A]])
    assert batch.segment_ids[0].tolist() == [1, 1, 0]
    assert batch.labels[0].tolist() == [I, 3, I]
    assert batch.num_targets == 3


def test_the_width_can_be_rounded_up():
    assert SampleCollator(0, multiple_of=8)([[A, B]]).input_ids.shape == (1, 8)
    assert SampleCollator(0, multiple_of=5)([[A, B]]).input_ids.shape == (1, 5)


def test_counts_agree_with_the_tensors_of_a_random_batch():
    rng = np.random.default_rng(0)
    rows = [[_random_sample(rng) for _ in range(rng.integers(1, 4))] for _ in range(5)]
    batch = SampleCollator(0)(rows)
    attended = targets = 0
    for row in range(5):
        for t in range(batch.segment_ids.shape[1]):
            segment = batch.segment_ids[row, t]
            if segment > 0:
                attended += int((batch.segment_ids[row, : t + 1] == segment).sum())
            if t > 0 and batch.labels[row, t] != I:
                assert segment == batch.segment_ids[row, t - 1]
                targets += 1
    assert batch.num_attended == attended
    assert batch.num_targets == targets
    assert batch.num_tokens == int((batch.segment_ids > 0).sum())


def _random_sample(rng):
    ids = rng.integers(1, 50, rng.integers(1, 7))
    return sample(ids, np.where(rng.random(len(ids)) < 0.5, ids, I))


def test_an_empty_batch_has_a_shape_and_nothing_else():
    batch = SampleCollator(7).empty()
    assert batch.input_ids.tolist() == [[7]]
    assert batch.labels.tolist() == [[I]]
    assert batch.segment_ids.tolist() == batch.position_ids.tolist() == [[0]]
    counts = (batch.num_targets, batch.num_tokens, batch.num_samples, batch.num_attended)
    assert counts == (0, 0, 0, 0)
    assert batch.input_ids.dtype == torch.int64


def test_moving_a_batch_moves_its_tensors_and_keeps_its_counts():
    moved = SampleCollator(0)([[A]]).to("meta")
    tensors = (moved.input_ids, moved.position_ids, moved.segment_ids, moved.labels)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.num_tokens == 3
