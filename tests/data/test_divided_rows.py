"""Rows whose tokens ranks divide: together they have every token, target and count once."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.data.batch import PairCollator, SampleCollator
from helpers.pair_runs import ragged_pairs
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
    assert sum(len(part.target_ids) for part in every) == whole.num_targets


@pytest.mark.parametrize("layout", ["shared", "separate"])
@pytest.mark.parametrize("size", [2, 3])
def test_answers_of_pairs_are_read_where_their_tokens_are(size, layout):
    pairs = ragged_pairs(5)
    groups = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    rows = [pairs[:2], pairs[2:3], pairs[3:]]
    every = [PairCollator(0, layout, context=group)(rows) for group in groups]
    tokens, positions = (
        torch.cat([getattr(part, name)[0] for part in every])
        for name in ("input_ids", "position_ids")
    )
    width = every[0].input_ids.shape[1]

    def found(name):
        """Places in all tokens; each is known to one rank."""
        local = torch.stack([getattr(part, name) for part in every])
        assert ((local >= 0).sum(0) == 1).all()
        return (
            (local + width * torch.arange(size).view(-1, *[1] * (local.dim() - 1)))
            .where(local >= 0, 0)
            .sum(0)
        )

    sequences = [getattr(pair, side) for side in ("chosen", "rejected") for pair in pairs]
    assert tokens[found("ends")].tolist() == [ids[-1] for ids in sequences]
    assert positions[found("ends")].tolist() == [len(ids) - 1 for ids in sequences]
    assert tokens[found("compared")].tolist() == [
        [
            int(ids[step])
            for pair, ids in zip(pairs, side, strict=True)
            for step in range(pair.shared_length, min(len(pair.chosen), len(pair.rejected)))
        ]
        for side in (sequences[:5], sequences[5:])
    ]
    read = [
        (int(owner), int(positions[rank * width + place]), int(target))
        for rank, part in enumerate(every)
        for owner, place, target in zip(
            part.owner, part.logit_positions, part.target_ids, strict=True
        )
    ]
    assert sorted(read) == [
        (owner, step - 1, int(ids[step]))
        for owner, ids in enumerate(sequences)
        for step in range(pairs[owner % 5].prompt_length, len(ids))
    ]
