"""Pretraining text that is read while training: as far as it was used, whatever was read."""

import json

import pytest
from streams import streaming

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.streaming.loader import Stream, StreamLoader
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.packing import make_rows
from dschat_lora.data.sources import StreamError
from dschat_lora.rl.learn.pretraining import Pretraining


@pytest.fixture
def file(tmp_path):
    rows = [{"text": f"text {number}" + "x" * (number % 5)} for number in range(11)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def fresh(file):
    """``fresh()``: text in blocks of five rows and steps of two, and its stream."""
    streams = []

    def make():
        data = streaming([file], shuffle_buffer_size=5)
        run = {"phase": 3, "seed": 3, "eos_id": 2, "kind": "samples"}
        streams.append(Stream(data, build_byte_tokenizer(), **run, left_out=frozenset()))
        loader = StreamLoader(
            streams[-1],
            pack=lambda counts, seed: make_rows(
                counts.positions, max_seq_len=64, packing=False, seed=seed
            ),
            steps=99,
            taken=2,
            names=(),
            kind="samples",
            say=print,
            seed=3,
            micro_batch_size=2,
            gradient_accumulation_steps=1,
            rank=0,
            world_size=1,
            collate=SampleCollator(0),
        )
        return Pretraining(loader, coefficient=1.0), streams[-1]

    yield make
    for each in streams:
        each.close()


def rows_of(texts, count):
    return [texts.window().batches[0].input_ids.tolist() for _ in range(count)]


@pytest.mark.parametrize("ahead", [0, 4])
def test_text_goes_on_behind_what_was_used_however_much_was_read(fresh, ahead):
    whole, _ = fresh()
    expected = rows_of(whole, 12)
    assert len({str(rows) for rows in expected}) > 9
    for used in (0, 3, 6, 9):
        first, _ = fresh()
        first.read(used + ahead)
        rows_of(first, used)
        resumed, _ = fresh()
        resumed.restore(json.loads(json.dumps(first.state())))
        assert rows_of(resumed, 3) == rows_of(first, 3) == expected[used : used + 3]


def test_text_that_cannot_be_read_is_told_before_the_steps_that_need_it(fresh):
    texts, stream = fresh()
    blocks, honest = iter(range(2)), stream.next

    def next_or_fail():
        if next(blocks, None) is None:
            raise StreamError("lost")
        return honest()

    stream.next = next_or_fail
    rows_of(texts, 3)
    before = json.dumps(texts.state())
    with pytest.raises(StreamError):
        texts.read(4)  # ten of the rows are known
    assert json.dumps(texts.state()) == before
    expected, _ = fresh()
    assert rows_of(texts, 2) == rows_of(expected, 5)[3:]
