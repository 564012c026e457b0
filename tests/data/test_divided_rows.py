"""Rows whose tokens ranks divide: together they have every token, target and count once."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.data.batch import SampleCollator
from helpers.tiny import ragged_samples

SAMPLES = ragged_samples(5)
ROWS = [SAMPLES[:2], SAMPLES[2:3], SAMPLES[3:]]


def parts(size, rows):
    groups = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    return [SampleCollator(0, context=group)(rows) for group in groups]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_together_are_the_samples_one_after_another(size):
    every = parts(size, ROWS)
    tokens = torch.cat([torch.from_numpy(sample.input_ids) for sample in SAMPLES]).long()
    positions = torch.cat([torch.arange(len(sample.input_ids)) for sample in SAMPLES])
    padding = -len(tokens) % size
    assert {part.input_ids.shape for part in every} == {(1, (len(tokens) + padding) // size)}
    for name, expected in (("input_ids", tokens), ("position_ids", positions)):
        found = torch.cat([getattr(part, name)[0] for part in every])
        assert torch.equal(found[: len(tokens)], expected)
    for part in every:
        lengths = [queries for queries, _ in part.spans.lengths]
        assert lengths == [len(s.input_ids) for s in SAMPLES] + [padding] * (padding > 0)
        assert part.spans.places is None


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_target_is_where_the_token_before_it_is(size):
    every = parts(size, ROWS)
    found = []
    for rank, part in enumerate(every):
        width = part.input_ids.shape[1]
        found += zip(
            (rank * width + part.logit_positions).tolist(), part.target_ids.tolist(), strict=True
        )
    expected, start = [], 0
    for sample in SAMPLES:
        for step in range(1, len(sample.input_ids)):
            if sample.labels[step] >= 0:
                expected.append((start + step - 1, int(sample.input_ids[step])))
        start += len(sample.input_ids)
    assert found == expected


@pytest.mark.parametrize("size", [2, 4])
def test_counts_of_the_parts_add_up_to_those_of_the_whole(size):
    whole, every = SampleCollator(0)(ROWS), parts(size, ROWS)
    for name in ("num_targets", "num_tokens", "num_samples", "num_attended"):
        assert sum(getattr(part, name) for part in every) == getattr(whole, name)
    assert all(part.num_targets == len(part.target_ids) for part in every)
