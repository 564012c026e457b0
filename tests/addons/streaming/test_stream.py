"""Rows that are read while training: the same steps however they are read, and where they end."""

import gzip
import io
import json
import re
import sys
import tarfile
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from datasets import Dataset
from huggingface_hub.utils import httpx
from streams import streaming

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.streaming import stream
from dschat_lora.addons.streaming.loader import Stream, StreamLoader
from dschat_lora.addons.streaming.stream import next_pool
from dschat_lora.addons.streaming.tar_rows import tar_rows
from dschat_lora.data import readers
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.packing import TokenBudget, make_rows
from dschat_lora.data.prepare import prepare
from dschat_lora.data.rows import config_sources
from dschat_lora.data.sources import StreamError

EOS, SEED, LENGTH = 2, 5, 48
ROW = SampleCollator(0)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(stream, "WAITS", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three files of 40, 7 and 30 rows of 8 to 30 tokens."""
    return write_shards(tmp_path_factory.mktemp("shards"))


def write_shards(directory, sizes=(40, 7, 30), tag="row"):
    draw = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        rows = [
            {"prompt": f"{tag} {number}.{i}:", "completion": " x" + "x" * int(draw.integers(20))}
            for i in range(size)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"part{number}.jsonl").write_text(text)
    return directory


def config_of(*paths, **options):
    return streaming(paths, **({"max_seq_len": LENGTH} | options))


def streamed(*paths, state=None, world=1, rank=0, budget=None, say=print, left_out=(), **options):
    """A loader of 4 rows a step, from the state that another one had."""
    config = config_of(*paths, **options)
    reader = Stream(
        config,
        build_byte_tokenizer(),
        phase=1,
        seed=SEED,
        eos_id=EOS,
        kind="samples",
        left_out=frozenset(left_out),
    )

    def pack(counts, seed):
        if budget is not None:
            return budget.groups(counts, seed=seed)
        return make_rows(counts.positions, max_seq_len=LENGTH, packing=True, seed=seed)

    loader = StreamLoader(
        reader,
        pack=pack,
        steps=1000,
        taken=4 if budget is None else budget.groups_per_step,
        names=[path.name for path in paths],
        kind="samples",
        seed=SEED,
        say=say,
        micro_batch_size=1 if budget is not None else 4 // world,
        gradient_accumulation_steps=1 if budget is None else budget.micro_batches // world,
        rank=rank,
        world_size=world,
        collate=ROW,
        budget=budget,
    )
    if state is not None:
        loader.restore(json.loads(json.dumps(state)))
    return loader


def steps_of(loader, count):
    """The rows of the next steps, each the tokens of a row of a batch."""
    try:
        return [rows_of(window) for window in islice(loader.steps(0), count)]
    finally:
        loader._stream.close()


def rows_of(window):
    return [tuple(ids.tolist()) for batch in window for ids in batch.input_ids]


def texts_of(rows):
    """The prompts of the samples in rows of bytes."""
    text = build_byte_tokenizer().decode([token for row in rows for token in row])
    return re.findall(r"\w+ \d+\.\d+(?=:)", text)


@pytest.mark.parametrize("tokens", [None, 60])
def test_one_block_gives_the_steps_of_prepared_files(shards, tmp_path, tokens):
    config = replace(config_of(shards), tail=None)
    tokenizer = build_byte_tokenizer()
    prepared = prepare(
        config, tokenizer, phase=1, seed=SEED, eos_id=EOS, cache_dir=tmp_path / "cache"
    )
    counts = ROW.counts(prepared.train)
    budget = TokenBudget(tokens, 4, 60) if tokens else None
    rows = make_rows(counts.positions, max_seq_len=LENGTH, packing=True, seed=SEED)
    whole = StepLoader(
        prepared.train,
        rows=budget.groups(counts, seed=SEED) if budget else rows,
        micro_batch_size=1 if budget else 4,
        gradient_accumulation_steps=4 if budget else 1,
        rank=0,
        world_size=1,
        seed=SEED,
        collate=ROW,
        budget=budget,
    )
    count = 2 * whole.steps_per_epoch + 3  # three passes, whose shards have other orders
    expected = [rows_of(window) for window in islice(whole.steps(0), count)]
    assert steps_of(streamed(shards, budget=budget), count) == expected


def test_a_pass_in_small_blocks_has_every_row_once(shards):
    loader = streamed(shards, shuffle_buffer_size=10)
    epochs = Counter()
    passes = []
    for window in loader.steps(0):
        whole = window.metrics["epoch"]
        if whole > 2:
            break
        passes.append(sorted(texts_of(rows_of(window))))
        epochs.update(texts_of(rows_of(window)))
    loader._stream.close()
    assert len(epochs) == 77
    assert set(epochs.values()) == {2}


def test_blocks_of_two_passes_are_in_another_order(shards):
    steps = steps_of(streamed(shards, shuffle_buffer_size=10), 60)
    found = [name for rows in steps for name in texts_of(rows)]
    assert found[:40] != found[77:117]


@pytest.mark.parametrize("workers", [2, 4])
def test_steps_do_not_depend_on_the_workers(shards, workers):
    alone = steps_of(streamed(shards, shuffle_buffer_size=10), 30)
    options = {"shuffle_buffer_size": 10, "preprocessing_num_workers": workers}
    assert steps_of(streamed(shards, **options), 30) == alone


def test_two_ranks_have_the_rows_of_one(shards):
    alone = steps_of(streamed(shards, shuffle_buffer_size=10), 30)
    ranks = [
        steps_of(streamed(shards, shuffle_buffer_size=10, world=2, rank=rank), 30)
        for rank in range(2)
    ]
    content = [
        sorted(texts_of(first) + texts_of(second)) for first, second in zip(*ranks, strict=True)
    ]
    assert content == [sorted(texts_of(rows)) for rows in alone]


def test_a_run_goes_on_from_every_step_as_if_it_had_not_ended(shards):
    options = {"shuffle_buffer_size": 10, "max_seq_len": 24}  # some rows are too long
    whole, states = [], []
    loader = streamed(shards, **options)
    for window in islice(loader.steps(0), 30):
        whole.append((rows_of(window), window.metrics))
        states.append(loader.state())
    loader._stream.close()
    assert states[-1]["unused"]["too long"] > 0
    for step, state in enumerate(states[:-3], start=1):
        resumed = streamed(shards, **options, state=state)
        found = [(rows_of(window), window.metrics) for window in islice(resumed.steps(step), 3)]
        resumed._stream.close()
        assert found == whole[step : step + 3]
        assert resumed.state()["unused"] == states[step + 2]["unused"]


KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tar", "csv", "json")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_on_from_every_place_of_a_file(tmp_path, kind):
    file = write_rows(tmp_path / f"rows.{kind}", 30)
    placed = list(stream._file(file, stream.Place()))
    whole = [row.read().values for row, _ in placed]
    assert [values["completion"] for values in whole] == [f" {i}" for i in range(30)]
    for number, (_, place) in enumerate(placed, start=1):
        rest = list(stream._file(file, place))
        assert [row.read().values for row, _ in rest] == whole[number:]
        assert [after for _, after in rest] == [after for _, after in placed[number:]]
        assert [r.location for r, _ in rest] == [r.location for r, _ in placed[number:]]


def write_rows(path, count):
    rows = [{"prompt": f"{i}:", "completion": f" {i}"} for i in range(count)]
    lines = "\n".join(json.dumps(row) for row in rows).replace("\n", "\n\n", 3) + "\n"
    kind = path.name.partition(".")[2]
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.compress(lines.encode()))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        cells = [f'"{row["prompt"]}","{row["completion"]}"' for row in rows]
        path.write_text("\n".join(["prompt,completion", *cells]))
    elif kind == "parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        with tarfile.open(path, "w") as archive:
            for number, row in enumerate(rows):
                for extension, text in (("json", json.dumps(row)), ("meta.txt", "x")):
                    member = tarfile.TarInfo(f"a/{number:04}.{extension}")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_file_that_became_shorter_is_not_taken_for_read(tmp_path, kind):
    file = write_rows(tmp_path / f"rows.{kind}", 30)
    *_, (_, end) = stream._file(file, stream.Place())
    assert list(stream._file(file, end)) == []
    write_rows(file, 20)
    with pytest.raises((ValueError, EOFError), match="it has become shorter"):
        list(stream._file(file, end))


def test_members_of_a_tar_file_that_are_no_sample_are_passed_over(tmp_path, monkeypatch):
    names = "._0.json README ./0.json ./0.TXT d.x/.DS_Store d.x/1.json d.x/1.en.txt 1.json".split()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, name in enumerate(names):
            text = json.dumps({"n": number}).encode()
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
        link = tarfile.TarInfo("2.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    rows = [row.values for row in readers.iter_file(tmp_path / "a.tar")]
    assert rows == [{"n": 2, "text": '{"n": 3}'}, {"n": 5, "en.txt": '{"n": 6}'}, {"n": 7}]
    # Files without content have their names.
    monkeypatch.setattr("dschat_lora.data.readers.MOST_ROW", 2000)
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for number in range(4):
            archive.addfile(tarfile.TarInfo(f"0.x{number}"))
    with pytest.raises(ValueError, match="the row holds more than 2,000 bytes"):
        list(readers.iter_file(tmp_path / "b.tar"))


@pytest.mark.parametrize(
    ("name", "column"), [("a.jpg", "images"), ("a.0.mp4", "videos"), ("a.WAV", "audios")]
)
def test_a_file_of_a_tar_that_is_no_text_is_a_column_that_is_refused(name, column):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for member, text in (("a.txt", b"t"), (name, b"x")):
            found = tarfile.TarInfo(member)
            found.size = len(text)
            archive.addfile(found, io.BytesIO(text))
    content.seek(0)
    found = {"bytes": b"x", "path": name} if column == "images" else name
    assert list(tar_rows(content, most=2**20)) == [({"text": "t", column: [found]}, None)]


def test_what_is_before_the_block_is_not_read_again(shards, monkeypatch):
    loader = streamed(shards, shuffle_buffer_size=10)
    positions = []
    for _ in islice(loader.steps(0), 12):
        start = loader.state()["start"]
        positions.append(stream.Position(*start["at"][0][0]))
    loader._stream.close()
    (position, *_) = [each for each in positions if each.shard and each.byte]
    seen = []
    honest = readers._Lines.__next__

    def counting(lines):
        seen.append(honest(lines))
        return seen[-1]

    monkeypatch.setattr(readers._Lines, "__next__", counting)
    chunk = next(loader._stream.pools[0].chunks(position))
    text = (shards / f"part{chunk.shard}.jsonl").read_bytes()
    assert seen == text[position.byte :].splitlines(keepends=True)
    assert seen == [row.text for row in chunk.rows]
    assert len(seen) < text.count(b"\n")


# ----------------------------------------------------------------------------------- failures


def failing(path, *, at, times, error=ValueError):
    """``iter_unread_file``, which fails so often at a row of this file."""
    honest, failures = readers.iter_unread_file, []

    def read(file, start):
        for row in honest(file, start):
            if file.name == path and row.location.endswith(f":{at}") and len(failures) < times:
                failures.append(start)
                raise error(f"{file} cannot be read: connection lost")
            yield row

    return read


@pytest.mark.parametrize("error", [ValueError, httpx.ConnectError])
def test_a_shard_that_fails_for_a_while_is_read_on(shards, monkeypatch, error):
    whole = steps_of(streamed(shards, shuffle_buffer_size=10), 30)
    monkeypatch.setattr(
        stream, "iter_unread_file", failing("part2.jsonl", at=9, times=3, error=error)
    )
    assert steps_of(streamed(shards, shuffle_buffer_size=10), 30) == whole


def test_a_shard_that_cannot_be_read_is_named_after_all_that_came_before(shards, monkeypatch):
    monkeypatch.setattr(stream, "iter_unread_file", failing("part2.jsonl", at=29, times=4))
    loader = streamed(shards, shuffle_buffer_size=10)
    with pytest.raises(StreamError) as caught:
        list(loader.steps(0))
    loader._stream.close()
    assert str(caught.value) == (
        f"{shards}/part2.jsonl could not be read on after row 28, tried 4 times: "
        f"{shards}/part2.jsonl cannot be read: connection lost"
    )
    monkeypatch.undo()
    state = loader.state()
    resumed = steps_of(streamed(shards, shuffle_buffer_size=10, state=state), 4)
    whole = steps_of(streamed(shards, shuffle_buffer_size=10), 40)
    done = whole.index(resumed[0])
    assert done > 0
    assert whole[done : done + 4] == resumed


def test_a_bad_row_stops_or_is_counted_and_quoted(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"row 0.{i}:", "completion": " x"} for i in range(9)]
    long = {"prompt": "row 0.9:", "completion": " x" * LENGTH}
    file.write_text("\n".join([*map(json.dumps, rows), "{", json.dumps(long)]) + "\n")
    loader, said = streamed(file), []
    with pytest.raises(ValueError, match=r"rows.jsonl:10: not valid JSON"):
        next(loader.steps(0))
    loader._stream.close()
    loader = streamed(file, bad_rows="skip", say=said.append)
    for _ in islice(loader.steps(0), 3):
        pass
    loader._stream.close()
    bad = f"  bad row      {file}:10: not valid JSON"
    assert [line.partition(" (")[0] for line in said if line.startswith("  bad")] == [bad]
    assert loader.state()["unused"] == {"bad": 3, "too long": 3}  # three passes


def test_held_out_rows_and_prompts_are_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"row 0.{i // 2}:", "completion": f" {i}"} for i in range(60)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_byte_tokenizer()
    config = config_of(file, eval_ratio=0.2)
    prepared = prepare(
        config, tokenizer, phase=1, seed=SEED, eos_id=EOS, cache_dir=tmp_path / "cache"
    )
    samples = [prepared.eval[number].input_ids for number in range(len(prepared.eval))]
    held_out = set(texts_of(samples))
    loader = streamed(file, left_out=prepared.left_out, max_repeats=(1,))
    found = Counter(name for window in loader.steps(0) for name in texts_of(rows_of(window)))
    loader._stream.close()
    assert len(held_out) == 6
    assert set(found) == {f"row 0.{i}" for i in range(30)} - held_out
    assert set(found.values()) == {2}
    assert loader.state()["unused"] == {"held out": 12}


def test_rows_behind_the_first_are_left_out_by_their_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr("dschat_lora.data.rows.HEAD_ROWS", 20)
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"row 0.{i % 5}:", "completion": f" {i}"} for i in range(10)]
    rows += [{"text": f"row 1.{i}:"} for i in range(10)]  # held out by themselves alone
    rows += [{"prompt": f"row 0.{i % 5}:", "completion": f" {i}"} for i in range(20, 40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, tokenizer = config_of(file, eval_ratio=0.6), build_byte_tokenizer()
    options = {"phase": 1, "seed": SEED, "eos_id": EOS, "cache_dir": tmp_path / "cache"}
    prepared = prepare(config, tokenizer, **options)
    samples = [prepared.eval[number].input_ids for number in range(len(prepared.eval))]
    held_out = set(texts_of(samples))
    assert {name[:5] for name in held_out} == {"row 0", "row 1"}
    loader = streamed(file, left_out=prepared.left_out, max_repeats=(1,))
    found = Counter(name for window in loader.steps(0) for name in texts_of(rows_of(window)))
    loader._stream.close()
    everything = Counter(row.get("prompt", row.get("text"))[:-1] for row in rows)
    assert found == {name: n for name, n in everything.items() if name not in held_out}


def test_a_prompt_that_is_trained_on_too_is_not_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "row 0.0:", "completion": f" {i}"} for i in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"phase": 1, "seed": SEED, "eos_id": EOS, "cache_dir": tmp_path / "cache"}
    prepared = prepare(config_of(file, eval_ratio=0.2), build_byte_tokenizer(), **options)
    loader = streamed(file, left_out=prepared.left_out, max_repeats=(1,))
    found = [name for window in loader.steps(0) for name in texts_of(rows_of(window))]
    loader._stream.close()
    assert (len(prepared.eval), len(found)) == (4, 16)


def test_another_seed_reads_the_shards_in_another_order(shards, monkeypatch):
    orders = set()
    for seed in range(6):
        monkeypatch.setattr(sys.modules[__name__], "SEED", seed)
        (first,) = steps_of(streamed(shards, shuffle_buffer_size=4), 1)
        orders.add(texts_of(first)[0].split(".")[0])
    assert len(orders) > 1


# ------------------------------------------------------------------------------------ mixtures


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three sources, each with one file, of 300, 90 and 50 rows."""
    found = []
    for name, size in (("a", 300), ("b", 90), ("c", 50)):
        directory = tmp_path_factory.mktemp(name)
        found.append(write_shards(directory, (size // 2, size - size // 2), tag=name))
    return found


def mixed(sources, *shares, **options):
    paths = [f"{path}:{share}" for path, share in zip(sources, shares, strict=True)]
    return streamed(*map(type(sources[0]), paths), **options)


def test_a_mixture_has_its_shares_at_every_block_and_nearly_at_every_step(sources):
    shares = (0.6, 0.3, 0.1)
    loader = mixed(sources, *shares, shuffle_buffer_size=50)
    total = Counter()
    for step, window in enumerate(islice(loader.steps(0), 400), start=1):
        total.update(name[0] for name in texts_of(rows_of(window)))
        if step >= 100:
            for name, share in zip("abc", shares, strict=True):
                assert abs(total[name] / total.total() - share) < 0.01
    loader._stream.close()
    read, names = loader.state()["read"], [path.name for path in sources]
    assert [read[f"samples/{name}:{s}"] for name, s in zip(names, shares, strict=True)] == [
        total[name] for name in "abc"
    ]
    start = loader.state()["start"]["at"]
    drawn = start[1]
    for rows, share in zip(drawn, shares, strict=True):
        assert abs(rows - share * sum(drawn)) < 1


def test_a_mixture_goes_on_from_every_step(sources):
    options = {"shuffle_buffer_size": 20, "max_repeats": (1, 1, 2)}
    said = []
    loader = mixed(sources, 2, 5, 3, **options, say=said.append)
    whole, states = [], []
    for window in loader.steps(0):
        whole.append((rows_of(window), window.metrics))
        states.append(loader.state())
    loader._stream.close()
    # Of the last passes nothing is said.
    assert said == [f"  note         {sources[2].name} was read once and is read again"]
    seen = Counter(name for rows, _ in whole for name in texts_of(rows))
    assert {n: c for n, c in seen.items() if n[0] == "c"} == {n: 2 for n in seen if n[0] == "c"}
    assert Counter(n[0] for n in seen) == {"a": 300, "b": 90, "c": 50}
    assert {c for n, c in seen.items() if n[0] in "ab"} == {1}
    for step in range(0, len(whole) - 3, 7):
        resumed = mixed(sources, 2, 5, 3, **options, state=states[step])
        found = [(rows_of(w), w.metrics) for w in islice(resumed.steps(step), 3)]
        resumed._stream.close()
        assert found == whole[step + 1 : step + 4]


def test_the_pool_that_is_furthest_behind_is_next():
    drawn = [0, 0, 0]
    for _ in range(10):
        drawn[next_pool([6, 3, 1], drawn, [False] * 3)] += 1
    assert drawn == [6, 3, 1]
    assert next_pool([6, 3, 1], [0, 0, 0], [True, False, False]) == 1


def shards_of(path, **options):
    return stream.find_shards(config_sources(config_of(path, **options), head=False), [0])


def test_a_source_may_be_cut_to_its_first_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(write_rows(tmp_path / "a.csv", 9).parent)
    (shard,) = shards_of("a.csv", max_source_rows=(5,))
    assert [row.location for row, _ in shard.read(stream.Place(3))] == ["a.csv:5", "a.csv:6"]


def test_a_hub_set_is_read_by_its_shards_from_any_row(monkeypatch):
    rows = Dataset.from_dict({"text": [f"t{i}" for i in range(10)]})
    asked = []

    def load_dataset(name, *config, split, streaming):
        asked.append((name, *config, split, streaming))
        return rows.to_iterable_dataset(num_shards=3)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    shards = shards_of("org/name:c:train:0.5")
    assert asked == [("org/name", "c", "train", True)]
    whole = [
        [(row.location, row.values["text"]) for row, _ in s.read(stream.Place())] for s in shards
    ]
    assert [text for shard in whole for _, text in shard] == [f"t{i}" for i in range(10)]
    assert whole[1][0][0] == "org/name:c:train, shard 2:1"
    for shard, content in zip(shards, whole, strict=True):
        rest = [(row.location, row.values["text"]) for row, _ in shard.read(stream.Place(2))]
        assert rest == content[2:]
