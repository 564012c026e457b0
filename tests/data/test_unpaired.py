"""Unpaired answers: rows with a label or pairs, mismatched answers, samples and batches."""

import random

import numpy as np
import pytest
import torch
from hand_tokenizers import build_byte_tokenizer

from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.collect import Collected
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import parse_row, require_usable
from dschat_lora.data.samples import UnpairedSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.data.unpaired import answers_of, unpair, with_mismatched
from dschat_lora.data.unpaired_batch import UnpairedCollator

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
    assert answers_of(good) == [good]


def test_answers_differ_where_prompt_answer_or_label_do():
    records = [
        answer("p", "a"),
        answer("p", "a", label=False),
        answer("p", "b"),
        pair("p", "a", "b"),
    ]
    assert len({record.digest("unpaired") for record in records}) == 4


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_shown_with_an_answer_to_another_prompt(seed):
    draw = random.Random(seed)
    records = [answer(f"prompt {draw.randrange(1, 8) if n % 3 else 0}", f"{n}") for n in range(60)]
    prompt_of = {record.completion: record.prompt for record in records}
    found = with_mismatched(records, [], seed=seed)
    for record, other in zip(records, found, strict=True):
        assert (other.prompt, other.completion) == (record.prompt, record.completion)
        assert prompt_of[other.mismatched] != record.prompt
    again = with_mismatched(records, [], seed=seed)
    assert [each.mismatched for each in again] == [each.mismatched for each in found]


def test_answers_to_unlike_prompts_are_each_shown_to_one_other():
    records = [answer(f"prompt {n}", f"{n}") for n in range(20)]
    found = with_mismatched(records, [], seed=1)
    assert sorted(each.mismatched for each in found) == sorted(each.completion for each in records)
    assert [each.mismatched for each in found] != [each.completion for each in records[1:]] + ["0"]


def test_one_held_out_prompt_borrows_answers_and_one_prompt_of_all_is_refused():
    (found,) = with_mismatched([answer("p", "a")], [answer("q", "b"), answer("p", "c")], seed=0)
    assert found.mismatched == "b"
    assert with_mismatched([], [], seed=0) == []
    with pytest.raises(ValueError, match=r"f:1: --loss_type kto needs answers to two prompts"):
        with_mismatched([answer("p", "a"), answer("p", "b")], [answer("p", "c")], seed=0)


def test_repeats_are_of_every_answer_of_a_row():
    rows = Collected(
        "unpaired",
        train=[(answer("p", "a"),), (pair("q", "b", "c"),), (answer("r", "d", label=False),)],
        train_repeats=[1, 3, 2],
        eval=[(pair("s", "e", "f"),)],
    )
    found = unpair(rows, seed=0)
    held_out = [each for (each,) in found.eval]
    assert [each.completion for (each,) in found.train] == ["a", "b", "c", "d"]
    assert found.train_repeats == [1, 3, 3, 2]
    assert [(each.completion, each.label) for each in held_out] == [("e", True), ("f", False)]
    assert {each.mismatched for each in held_out} <= {"a", "b", "c", "d"}


# ---------------------------------------------------------------------------- samples


def run(prompt, text, mismatched, *, max_seq_len=100, overlong="drop", label=True):
    tokenizer = build_byte_tokenizer()
    spans = (Span(prompt, target=False), Span(text, target=True))
    record = TextRecord("f:7", "unpaired preference", spans, label=label, mismatched=mismatched)
    rule = TokenRule(EOS, max_seq_len, overlong, train_on_prompt=False, kind="unpaired")
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    return result


def letters(text):
    return make_encoder(build_byte_tokenizer()).encode([text])[0]


@pytest.mark.parametrize("label", [True, False])
def test_both_answers_follow_the_prompt_and_end(label):
    sample = run("ab", "cd", "efg", label=label).sample
    assert sample.prompt.tolist() == letters("ab")
    assert sample.input_ids.tolist() == [*letters("abcd"), EOS]
    assert sample.mismatched.tolist() == [*letters("abefg"), EOS]
    assert (sample.label, sample.num_supervised, sample.ends_in(EOS)) == (int(label), 3, True)


def test_a_mismatched_answer_is_cut_and_makes_no_row_too_long():
    result = run("ab", "c", "defghij", max_seq_len=5)
    assert (result.length, result.truncated) == (4, False)
    assert result.sample.input_ids.tolist() == [*letters("abc"), EOS]
    assert result.sample.mismatched.tolist() == letters("abdef")


@pytest.mark.parametrize("text", ["cdefgh", "c"])
def test_too_long_answers_are_dropped_or_cut_as_in_supervised_training(text):
    prompt = "ab" if len(text) > 1 else "abcdefg"
    assert run(prompt, text, "x", max_seq_len=5).sample is None
    cut = run(prompt, text, "x", max_seq_len=5, overlong="truncate")
    if text == "c":  # nothing is left of the answer
        assert cut.sample is None
    else:
        assert cut.truncated
        assert cut.sample.input_ids.tolist() == letters("abcde")
        assert not cut.sample.ends_in(EOS)
    with pytest.raises(ValueError, match=r"f:7: \d tokens are more than --max_seq_len 5"):
        run(prompt, text, "x", max_seq_len=5, overlong="error")


# ---------------------------------------------------------------------------- batches

SAMPLES = [
    UnpairedSample(np.array([3, 4, 5, 6], np.int32), np.array([7], np.int32), 2, 1, (-1.0, -2.0)),
    UnpairedSample(np.array([8, 9], np.int32), np.array([5, 6, 7], np.int32), 1, 0, (-3.0, -4.0)),
    UnpairedSample(np.array([9, 9], np.int32), np.array([4, 4], np.int32), 0, 1, (-5.0, -6.0)),
]


def predicted(answers):
    """{answer: [(token before, token)]} of a batch."""
    tokens = answers.input_ids.flatten()
    found = {number: [] for number in range(len(answers.answer_lengths))}
    for position, target, owner in zip(
        answers.logit_positions, answers.target_ids, answers.owner, strict=True
    ):
        found[int(owner)].append((int(tokens[position]), int(target)))
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_predicts_each_answer_and_each_mismatched_one(packed):
    batch = UnpairedCollator(0)([SAMPLES] if packed else [[each] for each in SAMPLES])
    # nothing predicts a sequence's first token
    assert predicted(batch.answers) == {0: [(4, 5), (5, 6)], 1: [(8, 9)], 2: [(9, 9)]}
    assert predicted(batch.mismatched) == {0: [(4, 7)], 1: [(8, 5), (5, 6), (6, 7)], 2: [(4, 4)]}
    assert batch.answers.answer_lengths.tolist() == [2, 1, 1]
    assert batch.mismatched.answer_lengths.tolist() == [1, 3, 1]
    assert batch.answers.reference.tolist() == [-1.0, -3.0, -5.0]
    assert batch.mismatched.reference.tolist() == [-2.0, -4.0, -6.0]
    assert batch.labels.tolist() == [True, False, True]
    assert (batch.num_samples, batch.num_tokens, batch.num_targets) == (3, 8, 4)
    assert batch.answers.input_ids.shape == batch.mismatched.input_ids.shape
    assert batch.answers.input_ids.shape[1] == (10 if packed else 4)


def test_a_batch_of_nothing_has_answers_of_nothing():
    batch = UnpairedCollator(0).empty()
    assert batch.labels.shape == (0,)
    for answers in (batch.answers, batch.mismatched):
        assert predicted(answers) == {}
        assert answers.input_ids.shape == (1, 1)


def test_a_batch_moves_whole():
    batch = UnpairedCollator(0)([SAMPLES]).to("meta")
    moved = [batch.labels, batch.answers.owner, batch.mismatched.input_ids]
    assert {each.device for each in moved} == {torch.device("meta")}
