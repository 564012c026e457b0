import json
import multiprocessing
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dschat_lora.data import samples as store
from dschat_lora.data.cache import load_or_build
from dschat_lora.data.samples import SequenceSample, TokenSet, write_samples


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
    for outside in (-1, count):
        with pytest.raises(IndexError, match=f"sample {outside} of {count}"):
            read[outside]


def build(directory):
    (directory / "data.txt").write_text("payload")
    return {"rows": 3}


def test_a_second_call_reads_what_the_first_built(tmp_path):
    target = tmp_path / "cache" / "key"
    assert load_or_build(target, build) == ({"rows": 3}, False)
    assert load_or_build(target, lambda _: pytest.fail("built twice")) == ({"rows": 3}, True)
    assert (target / "data.txt").read_text() == "payload"
    assert sorted(p.name for p in target.parent.iterdir()) == [".lock", "key"]


def truncate(target):
    (target / "data.txt").write_text("pay")


def flip(target):
    (target / "data.txt").write_text("pAyload")


def lose(target):
    (target / "data.txt").unlink()


def lose_manifest(target):
    (target / "manifest.json").unlink()


def garble_manifest(target):
    (target / "manifest.json").write_text("[1]")


def come_from_elsewhere(target):
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps(manifest | {"name": "other"}))


def become_a_file(target):
    shutil.rmtree(target)
    target.write_text("")


@pytest.mark.parametrize(
    "spoil",
    [
        truncate,
        flip,
        lose,
        lose_manifest,
        garble_manifest,
        come_from_elsewhere,
        become_a_file,
    ],
)
def test_an_unsound_or_foreign_directory_is_rebuilt(tmp_path, spoil):
    target = tmp_path / "key"
    load_or_build(target, build)
    spoil(target)
    assert load_or_build(target, build) == ({"rows": 3}, False)
    assert load_or_build(target, build) == ({"rows": 3}, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "key"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(directory):
        build(directory)
        raise ValueError("bad row")

    with pytest.raises(ValueError, match="bad row"):
        load_or_build(tmp_path / "cache" / "key", fail)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_process_that_finishes_second_keeps_the_first_result(tmp_path):
    target = tmp_path / "key"

    def overtaken(directory):
        load_or_build(target, build)
        (target / "mark").write_text("first")
        return build(directory)

    assert load_or_build(target, overtaken) == ({"rows": 3}, False)
    assert (target / "mark").exists()


def race(target, start):
    start.wait()
    for _ in range(5):
        load_or_build(target, build)


def test_processes_that_build_at_once_agree(tmp_path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    target = tmp_path / "key"
    target.mkdir()  # unsound, so that all of them want to replace it
    workers = [context.Process(target=race, args=(target, start)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert load_or_build(target, build) == ({"rows": 3}, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "key"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--data_output_path .*file cannot be written \(.*\)"):
        load_or_build(tmp_path / "file" / "key", build)


def test_the_cache_is_readable_by_whoever_may_read_its_parent(tmp_path):
    before = os.umask(0o022)
    try:
        load_or_build(tmp_path / "key", build)
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o755


def digest_of(directory, samples, name="x.arrow"):
    write_samples(directory / name, samples)
    return TokenSet.read(directory / name).digest


def test_a_sample_by_its_runs():
    sample = SequenceSample(np.arange(11, 16, dtype=np.int32), (2, 2, 1))
    assert sample.labels.tolist() == [-100, -100, 13, 14, -100]
    assert (sample.num_supervised, sample.prompt.tolist()) == (2, [11, 12])
    assert (sample.ends_in(14), sample.ends_in(15)) == (True, False)
    same = SequenceSample.of(
        sample.input_ids, [11, -100, 13, 14, -100]
    )  # of the first it learns none
    assert list(same.runs) == [2, 2, 1]


@pytest.mark.parametrize("count", [0, 1, 9])
def test_digest_is_that_of_the_content_whatever_the_file(tmp_path, monkeypatch, count):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    first = digest_of(tmp_path, make_samples(count))
    assert digest_of(tmp_path, make_samples(count), "other.arrow") == first
    assert len(first) == 32
    assert int(first, 16) >= 0


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
