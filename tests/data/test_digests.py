"""The digest of samples by blocks: what they are, however stored, and where they differ."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from dschat_lora.data import digests
from dschat_lora.data.digests import NOT_COMPARED, DataDigest
from dschat_lora.data.samples import (
    PairSample,
    PromptSample,
    SequenceSample,
    TokenSet,
    UnpairedSample,
)


def ids(*numbers):
    return np.array(numbers, np.int32)


def sequences(count):
    lengths = np.random.default_rng(0).integers(2, 6, count)
    return [
        SequenceSample(np.arange(n, n + k, dtype=np.int32), (1, k - 1))
        for n, k in enumerate(lengths)
    ]


def blake(content):
    return hashlib.blake2b(content, digest_size=16)


def test_blocks_hold_tokens_lengths_and_what_is_supervised():
    """By definition: the hash of each block's fields, one sample after another."""
    samples, expected = sequences(130), []
    for first in (0, 64, 128):
        block = samples[first : first + 64]
        fields = {
            "input_ids": b"".join(each.input_ids.tobytes() for each in block),
            "input_ids lengths": b"".join(
                len(each.input_ids).to_bytes(8, "little") for each in block
            ),
            "supervised": b"".join(bytes(each.supervised.tolist()) for each in block),
        }
        parts = [name.encode() + blake(content).digest() for name, content in fields.items()]
        expected.append(blake(b"".join(parts)).hexdigest())
    assert TokenSet.of(samples).blocks == DataDigest(130, 64, tuple(expected))


def test_chunks_and_runs_without_tokens_change_nothing():
    samples = sequences(130)
    samples[7] = SequenceSample(ids(1, 2, 3), (1, 1, 1))
    parts = (samples[:1], samples[1:100], samples[100:])
    chunks = [chunk for part in parts for chunk in TokenSet.of(part)._chunks]
    same = [*samples[:7], replace(samples[7], runs=(1, 1, 1, 0)), *samples[8:]]
    assert TokenSet(chunks).blocks == TokenSet.of(same).blocks == TokenSet.of(samples).blocks


KINDS = {
    "pairs": (PairSample(ids(1, 2, 3, 4, 5), 1, 2, 1, 0.5), [
        {"prompt_length": 2}, {"shared_length": 3}, {"chosen_length": 2}, {"margin": 0.25},
        {"input_ids": ids(1, 2, 3, 4, 6)},
    ]),
    "unpaired": (UnpairedSample(ids(1, 2), ids(3), 1, 1), [
        {"label": 0}, {"prompt_length": 2}, {"mismatched_ids": ids(4)}, {"input_ids": ids(1, 3)},
    ]),
    "prompts": (PromptSample(ids(1, 2), b"{}"), [
        {"columns": b"[]"}, {"input_ids": ids(2, 2)},
    ]),
    "sequences": (SequenceSample(ids(1, 2, 3), (1, 2)), [
        {"runs": (2, 1)}, {"runs": (1, 1, 1)}, {"input_ids": ids(1, 2, 4)},
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_counts_and_where_it_differs_is_said(kind):
    sample, changes = KINDS[kind]
    before = TokenSet.of([sample] * 200)
    for change in changes:
        others = [*[sample] * 130, replace(sample, **change), *[sample] * 69]
        found = TokenSet.of(others).identity.difference(before.blocks.to_dict())
        assert (
            found == "(was 200 samples, now 200; the first difference is in samples 129 to 192)"
        ), change


def test_lengths_of_lists_that_join_to_the_same_are_told_apart():
    one, other = (
        [UnpairedSample(ids(1, 2), ids(*m), 1, 1) for m in both]
        for both in (((3,), (4, 5)), ((3, 4), (5,)))
    )
    assert TokenSet.of(one).blocks != TokenSet.of(other).blocks


def test_order_and_number_of_samples_count():
    samples = sequences(200)
    before = TokenSet.of(samples).blocks.to_dict()

    def found(others):
        return TokenSet.of(others).identity.difference(before)

    assert found(samples) is None
    swapped = [*samples[:70], samples[71], samples[70], *samples[72:]]
    assert (
        found(swapped) == "(was 200 samples, now 200; the first difference is in samples 65 to 128)"
    )
    assert (
        found([*samples, samples[0]])
        == "(was 200 samples, now 201; the first difference is in samples 193 to 201)"
    )
    assert (
        found(samples[:128])
        == "(was 200 samples, now 128; the first difference is in samples 129 to 192)"
    )


def test_many_samples_have_larger_blocks_that_compare_with_smaller_ones(monkeypatch):
    samples = sequences(400)
    fine = TokenSet.of(samples).blocks
    monkeypatch.setattr(digests, "MOST", 2)
    coarse = TokenSet.of(samples).blocks
    assert (fine.block, len(fine.blocks)) == (64, 7)
    assert (coarse.block, len(coarse.blocks)) == (256, 2)
    assert coarse.difference(fine) is fine.difference(coarse) is None
    samples[399] = samples[0]
    words = "(was 400 samples, now 400; the first difference is in samples 257 to 400)"
    assert TokenSet.of(samples).blocks.difference(fine) == words
    assert fine.difference(TokenSet.of(samples).blocks) == words


def test_a_checkpoint_of_0_3_0_has_a_hash_of_the_columns():
    samples = sequences(9)
    columns = [
        b"".join(len(each.input_ids).to_bytes(8, "little") for each in samples),
        b"".join(each.input_ids.tobytes() for each in samples),
        np.array([each.runs for each in samples], np.int32).tobytes(),
    ]
    stored = blake(b"".join(blake(column).digest() for column in columns)).hexdigest()
    known = TokenSet.of(samples).identity
    assert known.difference(stored) is None
    assert known.difference("0" * 32) == NOT_COMPARED
    assert TokenSet.of(samples[::-1]).identity.difference(stored) == NOT_COMPARED


@pytest.mark.parametrize(
    "then",
    [
        *(None, 3, {}, {"samples": 1, "block": 64}, {"samples": 9, "block": 64, "blocks": None}),
        *({"samples": 9, "block": n, "blocks": ["00"]} for n in (0, -64, 63, 192)),
        {"samples": 9, "block": 128, "blocks": [3]},
    ],
)
def test_what_is_no_digest_is_another_one(then):
    assert "now 9" in TokenSet.of(sequences(9)).identity.difference(then)
