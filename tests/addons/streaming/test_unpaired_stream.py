"""Answers of KTO that are read while training, each with one to another prompt of its block."""

import json
from dataclasses import replace

import pytest
from streams import streaming

from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.addons.streaming.loader import Stream, StreamBlock
from dschat_lora.data.prepare import prepare
from dschat_lora.data.sources import StreamError

EOS = 2


def write_answers(path, prompts):
    """Answers to these prompts in turn, some of them pairs, some too long."""
    rows = []
    for number, prompt in enumerate(prompts):
        row = {"prompt": f"{prompt}:", "completion": f" {number}" + " x" * (number % 40)}
        row["label"] = number % 2 == 0
        if number % 5 == 4:
            row = {"prompt": f"{prompt}:", "chosen": f" yes {number}", "rejected": " no"}
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))
    return path


def streamed_blocks(path, count, *, state=None, **options):
    """The first blocks that are read."""
    config = streaming([path], max_seq_len=48, **options)
    tokenizer = build_byte_tokenizer()
    stream = Stream(
        config, tokenizer, phase=2, seed=3, eos_id=EOS, kind="unpaired", left_out=frozenset()
    )
    stream.begin(state)
    try:
        return [StreamBlock.decode(stream.next(), "unpaired") for _ in range(count)]
    finally:
        stream.close()


def fields_of(samples):
    found = (samples[number] for number in range(len(samples)))
    return [
        (s.input_ids.tolist(), s.mismatched_ids.tolist(), s.prompt_length, s.label) for s in found
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_block_of_all_rows_has_the_answers_of_prepared_rows(tmp_path, workers):
    path = write_answers(tmp_path / "rows.jsonl", [f"p{n // 3}" for n in range(300)])
    config = replace(streaming([path], max_seq_len=48), tail=None)
    run = {"phase": 2, "seed": 3, "eos_id": EOS, "kind": "unpaired"}
    expected = prepare(config, build_byte_tokenizer(), cache_dir=tmp_path / "cache", **run)
    # Two passes: the answers to other prompts are the same ones.
    for block in streamed_blocks(path, 2, preprocessing_num_workers=workers):
        assert fields_of(block.samples) == fields_of(expected.train)
        assert block.unused == {"too long": expected.audit.dropped_rows}
        assert block.unused["too long"] > 0
        assert block.ends_epoch


def test_answers_of_a_block_are_shown_with_those_to_its_other_prompts(tmp_path):
    path = write_answers(tmp_path / "rows.jsonl", ["a", "a", "b"] * 7)
    tokenizer = build_byte_tokenizer()
    blocks = streamed_blocks(path, 6, shuffle_buffer_size=10)
    for block in blocks:
        texts = [tokenizer.decode(row[0]).removeprefix("<s>") for row in fields_of(block.samples)]
        prompts = {text.partition(":")[2].removesuffix("</s>"): text[0] for text in texts}
        for text, sample in zip(texts, fields_of(block.samples), strict=True):
            other = tokenizer.decode(sample[1]).removesuffix("</s>")
            assert other == " no" or prompts[other] != text[0]
    # The third block has the last row alone, whose answer nothing can be compared with.
    assert [len(block.samples) > 0 for block in blocks] == [True, True, False] * 2
    assert [block.unused for block in blocks] == [{}, {}, {"of one prompt alone": 1}] * 2
    assert [block.ends_epoch for block in blocks] == [False, False, True] * 2
    for number, block in enumerate(blocks):
        (again,) = streamed_blocks(path, 1, shuffle_buffer_size=10, state=block.start)
        assert fields_of(again.samples) == fields_of(block.samples), number


def test_rows_of_one_prompt_alone_are_refused(tmp_path):
    path = write_answers(tmp_path / "rows.jsonl", ["a"] * 12)
    with pytest.raises(
        StreamError,
        match=r"^rows.jsonl: all 10 rows of a block are of one prompt alone, and --loss_type kto "
        r"needs answers to two prompts or more: raise --shuffle_buffer_size, or shuffle the rows$",
    ):
        streamed_blocks(path, 1, shuffle_buffer_size=10)
