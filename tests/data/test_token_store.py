import math
import re
from dataclasses import replace

import numpy as np
import pytest

from dschat_lora.data import samples as store
from dschat_lora.data.samples import PairSample, SequenceSample, TokenSet, write_samples
from helpers.pairs import ragged_pairs


def make_samples(count):
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 1000, rng.integers(1, 9)).astype(np.int32) for _ in range(count)]
    return [SequenceSample.of(row, np.where(rng.random(len(row)) < 0.5, row, -100)) for row in ids]


@pytest.mark.parametrize("count", [0, 1, 8, 9, 30])
def test_samples_come_back_as_they_were_written(tmp_path, monkeypatch, count):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    samples = make_samples(count)
    write_samples(tmp_path / "x.arrow", samples)
    read = TokenSet.read(tmp_path / "x.arrow")
    assert len(read) == count
    assert read.lengths.tolist() == [len(sample.input_ids) for sample in samples]
    for index in reversed(range(count)):
        np.testing.assert_array_equal(read[index].input_ids, samples[index].input_ids)
        np.testing.assert_array_equal(read[index].labels, samples[index].labels)
        assert read[index].input_ids.dtype == np.int32
    assert digest_of(tmp_path, samples, "other.arrow") == read.digest
    assert re.fullmatch("[0-9a-f]{32}", read.digest)
    for outside in (-1, count):
        with pytest.raises(IndexError, match=f"sample {outside} of {count}"):
            read[outside]


def digest_of(directory, samples, name="x.arrow", kind="samples"):
    write_samples(directory / name, samples, kind)
    return TokenSet.read(directory / name, kind).digest


def test_a_sample_by_its_runs():
    sample = SequenceSample(np.arange(11, 16, dtype=np.int32), (2, 2, 1))
    assert sample.labels.tolist() == [-100, -100, 13, 14, -100]
    assert (sample.num_supervised, sample.prompt.tolist()) == (2, [11, 12])
    assert (sample.ends_in(14), sample.ends_in(15)) == (True, False)
    same = SequenceSample.of(
        sample.input_ids, [11, -100, 13, 14, -100]
    )  # of the first it learns none
    assert list(same.runs) == [2, 2, 1]


def test_digest_tells_any_other_content_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    samples = make_samples(9)

    long = np.arange(6, dtype=np.int32)
    samples[3:5] = SequenceSample(long, (2, 4)), SequenceSample(long, (3, 2, 1))

    def changed(index, **fields):
        return [*samples[:index], replace(samples[index], **fields), *samples[index + 1 :]]

    others = [
        *(changed(index, input_ids=samples[index].input_ids + 1) for index in range(9)),
        *(changed(3, runs=runs) for runs in ((6,), (3, 3), (2, 3, 1), (2, 1, 3), (2, 2, 1, 1))),
        *(samples[:8], samples[::-1], [*samples, samples[0]]),
        *([SequenceSample(long, (6,))], [SequenceSample(long[::-1], (6,))]),
        *([SequenceSample(long[:n], (n,)), SequenceSample(long[n:], (6 - n,))] for n in (2, 3)),
    ]
    digests = {digest_of(tmp_path, each) for each in [samples, *others]}
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_pairs_come_back_as_they_were_written(tmp_path, monkeypatch, count):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    pairs = [replace(pair, margin=0.25).sample() for pair in ragged_pairs(count)]
    write_samples(tmp_path / "x.arrow", pairs, "pairs")
    read = TokenSet.read(tmp_path / "x.arrow", "pairs")
    assert len(read) == count
    names = ("prompt_length", "shared_length", "chosen_length", "margin")
    for number, pair in enumerate(pairs):
        assert isinstance(read[number], PairSample)
        assert read[number].input_ids.tolist() == pair.input_ids.tolist()
        assert isinstance(read[number].prompt_length, int)
        assert all(map(math.isnan, read[number].reference))
        assert [getattr(read[number], n) for n in names] == [getattr(pair, n) for n in names]
    for name in names if count else ():
        assert read.column(name).tolist() == [getattr(pair, name) for pair in pairs]
    assert read.lengths.tolist() == [len(pair.input_ids) for pair in pairs]


def test_digest_of_pairs_tells_any_other_field_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    pairs = [pair.sample() for pair in ragged_pairs(6)]
    changes = {"input_ids": pairs[5].input_ids + 1, "margin": 9.0}
    changes |= dict.fromkeys(("prompt_length", "shared_length", "chosen_length"), 9)
    others = [
        [*pairs[:index], replace(pairs[index], **{name: value}), *pairs[index + 1 :]]
        for name, value in changes.items()
        for index in (0, 5)
    ]
    others += [pairs, pairs[::-1]]
    digests = {digest_of(tmp_path, each, kind="pairs") for each in others}
    assert len(digests) == 2 * len(changes) + 2
    assert digest_of(tmp_path, pairs, "same.arrow", kind="pairs") in digests
