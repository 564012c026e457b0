"""Unpaired answers: rows with a label or pairs, mismatched answers, and samples."""

import json
import random

import numpy as np
import pytest
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.algos.seeds import permutation
from dschat_lora.config.data import DataConfig
from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.prepare import preview
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import TextRecord, answers_of, to_records
from dschat_lora.data.rows import parse_row, require_usable
from dschat_lora.data.token_files import mismatched

EOS = 2


def answer(prompt, text, label=True):
    spans = (Span(prompt, target=False), Span(text, target=True))
    return TextRecord("f:1", "unpaired preference", spans, label=label)


def pair(prompt, chosen, rejected):
    spans = (Span(prompt, target=False), Span(chosen, target=True))
    return TextRecord("f:1", "preference", spans, rejected)


# ---------------------------------------------------------------------------- rows and records


@pytest.mark.parametrize("label", [True, False])
def test_a_row_with_a_label_is_an_answer_that_is_good_or_bad(label):
    row = parse_row(RawRow("f:1", {"prompt": "p", "completion": "c", "label": label}))
    assert row.kind == "unpaired preference"
    chat = Chat(build_byte_tokenizer(), "</s>")
    (record,) = to_records(require_usable(row, "unpaired"), chat, "unpaired")
    assert (record.prompt, record.completion, record.label) == ("p", "c", label)


@pytest.mark.parametrize("values", [{"prompt": "p", "completion": "c"}, {"text": "t"}])
def test_a_row_that_says_nothing_of_its_answer_is_refused(values):
    with pytest.raises(RowError, match=r"f:1: row lacks 'label', or 'chosen' and 'rejected'"):
        require_usable(parse_row(RawRow("f:1", values)), "unpaired")


def test_a_pair_is_a_good_and_a_bad_answer():
    good, bad = answers_of(pair("p", "yes", "no"))
    assert [(each.prompt, each.completion, each.label) for each in (good, bad)] == [
        ("p", "yes", True),
        ("p", "no", False),
    ]
    assert answers_of(good) == (good,)


def test_answers_differ_where_prompt_answer_or_label_do():
    records = [
        answer("p", "a"),
        answer("p", "a", label=False),
        answer("p", "b"),
        pair("p", "a", "b"),
    ]
    assert len({record.digest("unpaired") for record in records}) == 4


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_shown_with_the_next_one_to_another_prompt(seed):
    draw = random.Random(seed)
    prompts = [f"prompt {draw.randrange(1, 8) if n % 3 else 0}" for n in range(60)]
    order = permutation(60, "mismatched", seed).tolist()
    found = mismatched(np.array(prompts), seed=seed).tolist()
    for place, number in enumerate(order):
        following = (order[(place + step) % 60] for step in range(1, 60))
        assert found[number] == next(n for n in following if prompts[n] != prompts[number])


def test_answers_to_unlike_prompts_are_each_shown_to_one_other():
    found = mismatched(np.array([f"prompt {n}" for n in range(20)]), seed=1).tolist()
    assert sorted(found) == list(range(20))
    assert found != [*range(1, 20), 0]


@pytest.fixture
def run(run, jsonl, byte_tokenizer):
    """Token sets of answers, and whole texts of each sample: own, mismatched."""
    decode = byte_tokenizer.decode

    def call(rows, **options):
        prepared = run(jsonl(rows), phase=2, kind="unpaired", **options)
        return [
            [
                (decode(s.input_ids), decode(s.mismatched), s.label)
                for s in (part[i] for i in range(len(part)))
            ]
            for part in (prepared.train, prepared.eval)
        ]

    return call


def labelled(prompt, completion, label=True):
    return {"prompt": prompt, "completion": completion, "label": label}


def test_one_held_out_prompt_borrows_answers_and_one_prompt_of_all_is_refused(run, tmp_path):
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps(labelled("p", "a")))
    rows = [labelled("q", "b"), labelled("p", "c")]
    _, ((own, other, _),) = run(rows, eval_data_path=(str(held_out),))
    assert (own, other) == ("pa</s>", "pb</s>")
    with pytest.raises(
        ValueError, match=r"train.jsonl:1: --loss_type kto needs answers to at least two"
    ):
        run([labelled("p", "a"), labelled("p", "b")])


def test_repeats_are_of_every_answer_of_a_row(run):
    pair = {"prompt": "q", "chosen": "b", "rejected": "c"}
    train, _ = run([labelled("p", "a"), pair, labelled("r", "d", False)], data_weights=(2.0,))
    answers = [("pa</s>", 1), ("qb</s>", 1), ("qc</s>", 0), ("rd</s>", 0)]
    assert [(own, label) for own, _, label in train] == [each for each in answers for _ in "12"]
    assert all(own[0] == other[0] for own, other, _ in train)
    assert {(own[0], other[1]) for own, other, _ in train} <= {
        (mine, theirs) for mine in "pqr" for theirs in {"p": "bcd", "q": "ad", "r": "abc"}[mine]
    }


def test_what_is_shown_before_a_run_is_each_answer_with_its_own_tokens_in_brackets(tmp_path):
    rows = [
        {"prompt": "ab", "completion": "cd", "label": True},
        {"prompt": "ab", "chosen": "e", "rejected": "fg"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_byte_tokenizer()
    config = DataConfig(data_path=(str(path),), max_seq_len=16)
    shown = preview(config, tokenizer, eos_id=EOS, kind="unpaired")
    read = [(name, *each) for sample in shown for name, each in sample.sequences.items()]

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    expected = [("good answer", "cd"), ("good answer", "e"), ("bad answer", "fg")]
    for (name, tokens, supervised), (title, answer_text) in zip(read, expected, strict=True):
        answer_size = len(answer_text) + 1  # and its end
        assert (name, tokens[-answer_size:]) == (title, [*ids(answer_text), EOS])
        assert supervised == [0] * (len(tokens) - answer_size) + [1] * answer_size
