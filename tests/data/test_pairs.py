"""Pairs from their rows to tensors: tokens, store, counts and layouts by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hand_tokenizers import build_byte_tokenizer, build_metaspace_tokenizer

from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.config.data import DataConfig
from dschat_lora.data import samples as store
from dschat_lora.data.batch import PairCollator
from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RawRow, RowError
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import check_sources, parse_row
from dschat_lora.data.samples import PairSample, TokenSet, write_samples
from dschat_lora.data.tokenize import TokenRule, tokenize
from helpers.pairs import Answers, ragged_pairs, with_a_prefix

BOS, EOS = 1, 2


def make_record(prompt, chosen, rejected, *turns, margin=None):
    """A preference; ``turns`` come before the prompt, alternating context and answer."""
    context = [Span(text, target=i % 2 == 1) for i, text in enumerate([*turns, prompt])]
    return TextRecord("f.jsonl:3", "preference", (*context, Span(chosen, True)), rejected, margin)


def run(record, tokenizer, *, max_seq_len=100, overlong="drop", eos_id=EOS):
    rule = TokenRule(eos_id, max_seq_len, overlong, False, "pairs")
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    return result


def sequences(record, tokenizer, **options):
    pair = run(record, tokenizer, **options).sample
    return pair.prompt.tolist(), pair.chosen.tolist(), pair.rejected.tolist()


def letters(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(list(text))


def sft(prompt, completion, tokenizer, **options):
    """The same text as step 1 would have it."""
    record = TextRecord("f:1", "prompt-completion", (Span(prompt, False), Span(completion, True)))
    rule = TokenRule(options.pop("eos_id", EOS), 100, "drop", False)
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    return result.sample


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_both_sequences_are_those_of_supervised_training_with_one_end(bos, eos):
    tokenizer = build_byte_tokenizer(bos=bos, eos=eos)
    front = [BOS] if bos else []
    prompt, chosen, rejected = sequences(make_record("ab", "cd", "efg"), tokenizer)
    assert prompt == front + letters(tokenizer, "ab")
    assert chosen == prompt + letters(tokenizer, "cd") + [EOS]
    assert rejected == prompt + letters(tokenizer, "efg") + [EOS]
    assert chosen == sft("ab", "cd", tokenizer).input_ids.tolist()
    assert rejected == sft("ab", "efg", tokenizer).input_ids.tolist()


@pytest.mark.parametrize("answers", [("cd", "cx"), ("cx", "cd"), ("x", "cd"), ("cd", "x")])
def test_prompt_is_that_of_rollouts_whatever_merges_with_an_answer(answers):
    tokenizer = build_byte_tokenizer(bos=True, eos=True, merges=[("b", "c")])
    (rollout,) = make_encoder(tokenizer).encode(["ab"])
    prompt, *both = sequences(make_record("ab", *answers), tokenizer)
    assert prompt == rollout
    # "bc" is one token, so an answer that begins with c is tokenised alone
    assert both == [[*rollout, *letters(tokenizer, text), EOS] for text in answers]


def test_sentencepiece_adds_no_false_space_before_either_answer():
    tokenizer = build_metaspace_tokenizer()
    prompt, chosen, rejected = sequences(make_record("ab", "cd", " ef"), tokenizer)
    assert prompt == letters(tokenizer, "\u2581ab")
    assert chosen == [*letters(tokenizer, "\u2581abcd"), EOS]
    assert rejected == [*letters(tokenizer, "\u2581ab\u2581ef"), EOS]


def test_an_end_that_one_answer_brings_is_not_doubled():
    tokenizer = build_byte_tokenizer()
    a, b, c, d = letters(tokenizer, "abcd")
    for record in (make_record("ab", "c</s>", "d"), make_record("ab", "c", "d</s>")):
        assert sequences(record, tokenizer)[1:] == ([a, b, c, EOS], [a, b, d, EOS])


def test_the_end_may_be_another_token_than_the_tokenizers_own():
    _, chosen, rejected = sequences(make_record("a", "c", "d"), build_byte_tokenizer(), eos_id=0)
    assert (chosen[-1], rejected[-1]) == (0, 0)
    assert EOS not in chosen + rejected


def test_earlier_turns_belong_to_the_prompt():
    tokenizer = build_byte_tokenizer(bos=True)
    record = make_record("r", "b", "x", "q", "a</s>")
    q, a, r, b, x = letters(tokenizer, "qarbx")
    assert sequences(record, tokenizer) == (
        [BOS, q, a, EOS, r],
        [BOS, q, a, EOS, r, b, EOS],
        [BOS, q, a, EOS, r, x, EOS],
    )


def test_messages_whose_format_ends_itself_have_one_end_and_the_prompt_of_training():
    tokenizer = build_byte_tokenizer(bos=True)
    chat = Chat(tokenizer, "</s>")
    user, *answers = (
        {"role": role, "content": content}
        for role, content in (("user", "q"), ("assistant", "a"), ("assistant", "bc"))
    )
    row = {"chosen": [user, answers[0]], "rejected": [user, answers[1]]}
    (record,) = to_records(parse_row(RawRow("f:7", row)), chat)
    pair = run(record, tokenizer).sample
    for sequence, answer in zip((pair.chosen, pair.rejected), answers, strict=True):
        (training,) = to_records(parse_row(RawRow("f:7", {"messages": [user, answer]})), chat)
        (own,) = tokenize([training], make_encoder(tokenizer), TokenRule(EOS, 100, "drop", False))
        assert sequence.tolist() == own.sample.input_ids.tolist()
        assert pair.prompt.tolist() == own.sample.prompt.tolist()
        assert sequence.tolist().count(EOS) == 1


def test_a_beginning_in_the_text_is_not_doubled_but_counted():
    tokenizer = build_byte_tokenizer(bos=True)
    plain = run(make_record("ab", "c", "d"), tokenizer)
    doubled = run(make_record("<s>ab", "c", "d"), tokenizer)
    assert doubled.sample.input_ids.tolist() == plain.sample.input_ids.tolist()
    assert (plain.doubled_bos, doubled.doubled_bos) == (False, True)


def test_a_pair_is_kept_as_a_tree_whose_beginning_may_go_on_into_the_answers():
    tokenizer = build_byte_tokenizer()
    pair = run(make_record("ab", "cde", "cdfg"), tokenizer).sample
    assert pair.input_ids.tolist() == [
        *letters(tokenizer, "abcd"),
        *letters(tokenizer, "e"),
        EOS,
        *letters(tokenizer, "fg"),
        EOS,
    ]
    assert (pair.prompt_length, pair.shared_length, pair.chosen_length) == (2, 4, 2)
    # c d, e and its end, f g and its end
    assert pair.num_supervised == 2 + 2 + 3
    assert pair.ends_in(EOS)
    assert not pair.ends_in(0)


@pytest.mark.parametrize("cut", ["chosen", "rejected"])
def test_a_pair_ends_in_a_token_only_if_both_answers_do(cut):
    answers = ("cdef", "c") if cut == "chosen" else ("c", "cdef")
    result = run(
        make_record("ab", *answers), build_byte_tokenizer(), max_seq_len=4, overlong="truncate"
    )
    assert not result.sample.ends_in(EOS)


def test_an_answer_that_the_other_goes_on_from_leaves_nothing_of_its_own():
    tokenizer = build_byte_tokenizer()
    record = make_record("ab", "c</s>", "c</s>d")
    a, b, c, d = letters(tokenizer, "abcd")
    for each, both in (
        (record, ([a, b, c, EOS], [a, b, c, EOS, d, EOS])),
        (make_record("ab", "c</s>d", "c</s>"), ([a, b, c, EOS, d, EOS], [a, b, c, EOS])),
    ):
        assert sequences(each, tokenizer)[1:] == both


def test_the_margin_is_kept_and_zero_where_the_row_says_nothing():
    tokenizer = build_byte_tokenizer()
    assert run(make_record("a", "b", "c", margin=1.5), tokenizer).sample.margin == 1.5
    assert run(make_record("a", "b", "c"), tokenizer).sample.margin == 0.0
    assert all(map(math.isnan, run(make_record("a", "b", "c"), tokenizer).sample.reference))


@pytest.mark.parametrize("answers", [("cd", "e"), ("e", "cd")])
@pytest.mark.parametrize(("size", "dropped"), [(5, False), (4, True)])
def test_a_pair_is_too_long_if_either_sequence_is(answers, size, dropped):
    result = run(make_record("ab", *answers), build_byte_tokenizer(), max_seq_len=size)
    assert (result.sample is None, result.length, result.truncated) == (dropped, 5, False)
    assert not result.identical


@pytest.mark.parametrize("answers", [("cd", "e"), ("e", "cd")])
def test_an_overlong_pair_is_an_error_if_asked_for(answers):
    with pytest.raises(ValueError, match=r"^f\.jsonl:3: 5 tokens are more than --max_seq_len 4"):
        run(make_record("ab", *answers), build_byte_tokenizer(), max_seq_len=4, overlong="error")


def test_a_truncated_answer_gets_no_end_and_the_other_keeps_its_own():
    tokenizer = build_byte_tokenizer()
    result = run(make_record("ab", "cdef", "x"), tokenizer, max_seq_len=4, overlong="truncate")
    assert result.sample.chosen.tolist() == letters(tokenizer, "abcd")
    assert result.sample.rejected.tolist() == [*letters(tokenizer, "abx"), EOS]
    assert (result.truncated, result.length) == (True, 7)


@pytest.mark.parametrize(
    ("answers", "size"),
    [(("c", "c"), 100), (("cdx", "cdy"), 4), (("c", "d"), 2), (("c", "d"), 1)],
    ids=["equal", "equal once cut", "no room but for the prompt", "not even for that"],
)
def test_pairs_that_nothing_tells_apart_are_left_out_as_identical(answers, size):
    result = run(
        make_record("ab", *answers), build_byte_tokenizer(), max_seq_len=size, overlong="truncate"
    )
    assert result.sample is None
    assert (result.identical, result.truncated) == (True, False)


def test_pairs_that_differ_in_their_last_token_alone_are_kept():
    tokenizer = build_byte_tokenizer()
    record = make_record("ab", "cdx", "cdy")
    pair = run(record, tokenizer, max_seq_len=5, overlong="truncate").sample
    assert pair.shared_length == 4
    # one ends, one is cut there
    pair = run(make_record("ab", "c", "cd"), tokenizer, max_seq_len=4, overlong="truncate").sample
    a, b, c, d = letters(tokenizer, "abcd")
    assert (pair.chosen.tolist(), pair.rejected.tolist()) == ([a, b, c, EOS], [a, b, c, d])


# The store


def stored(tmp_path, pairs, name="x.arrow"):
    write_samples(tmp_path / name, pairs, "pairs")
    return TokenSet.read(tmp_path / name, "pairs")


def fields_of(pair):
    return (
        pair.input_ids.tolist(),
        pair.prompt_length,
        pair.shared_length,
        pair.chosen_length,
        pair.margin,
    )


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_pairs_come_back_as_they_were_written(tmp_path, monkeypatch, count):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    pairs = [replace(p, margin=0.25).sample() for p in ragged_pairs(count)]
    read = stored(tmp_path, pairs)
    assert len(read) == count
    assert [fields_of(read[i]) for i in range(count)] == [fields_of(pair) for pair in pairs]
    assert all(isinstance(read[i], PairSample) for i in range(count))
    if count:
        assert isinstance(read[0].prompt_length, int)
        assert all(map(math.isnan, read[0].reference))
        assert read.column("shared_length").tolist() == [pair.shared_length for pair in pairs]
        assert read.column("margin").tolist() == [0.25] * count
    assert read.lengths.tolist() == [len(pair.input_ids) for pair in pairs]


def test_digest_tells_any_other_field_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SAMPLES_PER_BATCH", 4)
    pairs = [pair.sample() for pair in ragged_pairs(6)]
    first = stored(tmp_path, pairs).digest
    assert stored(tmp_path, pairs, "same.arrow").digest == first
    changes = {
        "input_ids": pairs[5].input_ids + 1,
        "prompt_length": 9,
        "shared_length": 9,
        "chosen_length": 9,
        "margin": 9.0,
    }
    digests = {
        stored(
            tmp_path,
            [*pairs[:index], replace(pairs[index], **{name: value}), *pairs[index + 1 :]],
            f"{name}{index}.arrow",
        ).digest
        for name, value in changes.items()
        for index in (0, 5)
    }
    digests.add(stored(tmp_path, pairs[::-1], "reversed.arrow").digest)
    assert len(digests | {first}) == 2 * len(changes) + 2


# From files


@pytest.fixture
def prepared(run, jsonl):
    """What rows are prepared as, with settings of its own for one call."""
    return lambda rows, kind="pairs", **more: run(jsonl(rows), phase=2, kind=kind, **more)


def preference(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | more


def test_pairs_of_a_file_are_counted_by_what_became_of_them(prepared):
    result = prepared(
        [
            preference("ab", "cd", "e", margin=2),
            preference("ab", "same", "same"),
            preference("ab", "c" * 9 + "x", "c" * 9 + "y"),
            preference("ab", "x" + "c" * 9, "y"),
            preference("ab", "f", "gh"),
        ],
        max_seq_len=9,
        overlong="truncate",
    )
    audit = result.audit
    assert audit.train_rows == 5
    assert audit.identical_rows == 2
    assert audit.truncated_rows == 1
    assert audit.dropped_rows == 0
    assert audit.train_samples == len(result.train) == 3
    # trees: ab cd$ e$, ab x+6 c y$, ab f$ gh$; answers: 3+2, 7+2, 2+3
    assert audit.tokens == 7 + 11 + 7
    assert audit.supervised_tokens == 5 + 9 + 5
    assert audit.eos_samples == 2
    assert audit.rows_by_type == {"preference": 5}
    assert [result.train[i].margin for i in range(3)] == [2.0, 0.0, 0.0]
    assert any("2 pairs of equal answers left out" in line for line in audit.lines())


def test_overlong_pairs_are_dropped_and_not_taken_for_identical(prepared):
    audit = prepared(
        [preference("ab", "c" * 20, "d"), preference("ab", "c", "d")], max_seq_len=9
    ).audit
    assert (audit.dropped_rows, audit.identical_rows, audit.train_samples) == (1, 0, 1)


def test_a_run_without_a_pair_left_stops_with_the_reason(prepared):
    with pytest.raises(ValueError, match=r"of 2 training rows 2 have equal answers"):
        prepared([preference("a", "b", "b"), preference("c", "d", "d")]).audit.check()


def test_pairs_repeat_if_both_answers_do(prepared):
    rows = [
        preference("a", "b", "c"),
        preference("a", "b", "d"),
        preference("a", "b", "c"),
        preference("a", "c", "b"),
    ]
    assert prepared(rows).audit.duplicate_rows == 1
    assert prepared(rows, kind="samples").audit.duplicate_rows == 2


def test_held_out_pairs_are_known_by_both_answers(prepared, jsonl):
    held_out = jsonl([preference("a", "b", "c")], "eval.jsonl")
    rows = [preference("a", "b", "c"), preference("a", "b", "d")]
    options = {"eval_data_path": (str(held_out),)}
    assert prepared(rows, **options).audit.overlap_rows == 1
    assert prepared(rows, kind="samples", **options).audit.overlap_rows == 2


def test_pairs_and_samples_of_one_file_are_cached_apart(prepared):
    rows = [preference("a", "b", "c")]
    first, second = prepared(rows), prepared(rows, kind="samples")
    assert first.fingerprint != second.fingerprint
    assert not second.from_cache
    assert prepared(rows).from_cache
    assert prepared(rows).train[0].rejected.tolist() == first.train[0].rejected.tolist()


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "a", "completion": "b"}, r"\['completion', 'prompt'\]"),
        ({"text": "a"}, r"\['text'\]"),
        ({"prompt": "a"}, r"\['prompt'\]"),
    ],
)
def test_a_row_without_two_answers_is_refused_with_its_place(prepared, jsonl, row, found):
    message = rf"train\.jsonl:2: row lacks 'chosen' and 'rejected'; it has {found}; this stage com"
    rows = [preference("a", "b", "c"), row]
    with pytest.raises(RowError, match=message):
        prepared(rows)
    config = DataConfig(data_path=(str(jsonl(rows)),))
    with pytest.raises(RowError, match=message):
        check_sources(config, "pairs")
    skipped = prepared(rows, bad_rows="skip").audit
    assert (skipped.bad_rows, skipped.train_samples) == (1, 1)


@pytest.mark.parametrize("missing", ["chosen", "rejected"])
def test_a_row_with_one_of_two_answers_is_refused_with_its_place(prepared, missing):
    row = preference("a", "b", "c")
    del row[missing]
    with pytest.raises(RowError, match=rf"train\.jsonl:1: row lacks '{missing}'"):
        prepared([row])


# Batches

FIRST = Answers([5, 6], [7, 8, 9], [7, 10], 0.5, (-1.0, -2.0))
SECOND = Answers([11], [12], [13, 14], -1.0, (-3.0, -4.0))


def collate(layout, *rows, **options):
    return PairCollator(3, layout, **options)([[pair.sample() for pair in row] for row in rows])


def check(batch, **expected):
    for name, values in expected.items():
        found = getattr(batch, name)
        found = found.tolist() if isinstance(found, torch.Tensor) else found
        assert found == values, name


# What all layouts have in common: sequences are chosen of both pairs, then rejected.
SAME = {
    "answer_lengths": [3, 1, 2, 2],
    "target_ids": [7, 8, 9, 12, 7, 10, 13, 14],
    "owner": [0, 0, 0, 1, 2, 2, 3, 3],
    "compared_pair": [0, 1],
    "margins": [0.5, -1.0],
    "reference": [-1.0, -3.0, -2.0, -4.0],
    "num_targets": 8,
    "num_samples": 2,
}


def test_trees_in_one_row_by_hand():
    batch = collate("shared", [FIRST, SECOND], multiple_of=4)
    check(
        batch,
        # the beginning 5 6 7, chosen 8 9, rejected 10; the beginning 11, 12, 13 14
        input_ids=[[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 3, 3]],
        position_ids=[[0, 1, 2, 3, 4, 3, 0, 1, 1, 2, 0, 0]],
        segment_ids=[[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]],
        branch_ids=[[0, 0, 0, 1, 1, 2, 0, 1, 2, 2, 0, 0]],
        ends=[4, 7, 5, 9],
        logit_positions=[1, 2, 3, 6, 1, 2, 6, 8],
        compared=[[3, 7], [5, 8]],
        num_tokens=10,
        # 3 shared, 2 of chosen, 1 of rejected; 1, 1, 2
        num_attended=(1 + 2 + 3) + (4 + 5) + 4 + 1 + 2 + (2 + 3),
        **SAME,
    )


def test_trees_in_two_rows_are_counted_through_the_rows():
    batch = collate("shared", [FIRST], [SECOND])
    check(
        batch,
        input_ids=[[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 3, 3]],
        position_ids=[[0, 1, 2, 3, 4, 3], [0, 1, 1, 2, 0, 0]],
        segment_ids=[[1] * 6, [1, 1, 1, 1, 0, 0]],
        branch_ids=[[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 0, 0]],
        ends=[4, 7, 5, 9],
        logit_positions=[1, 2, 3, 6, 1, 2, 6, 8],
        compared=[[3, 7], [5, 8]],
        num_tokens=10,
        num_attended=19 + 8,
        **SAME,
    )


def test_sequences_side_by_side_by_hand():
    batch = collate("separate", [FIRST, SECOND])
    check(
        batch,
        input_ids=[[5, 6, 7, 8, 9, 5, 6, 7, 10, 11, 12, 11, 13, 14]],
        position_ids=[[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 0, 1, 2]],
        segment_ids=[[1] * 5 + [2] * 4 + [3] * 2 + [4] * 3],
        branch_ids=[[0] * 14],
        ends=[4, 10, 8, 13],
        logit_positions=[1, 2, 3, 9, 6, 7, 11, 12],
        compared=[[3, 10], [8, 12]],
        num_tokens=14,
        num_attended=15 + 10 + 3 + 6,
        **SAME,
    )


def test_a_row_for_each_sequence_by_hand():
    batch = collate("alone", [FIRST], [SECOND])
    check(
        batch,
        input_ids=[
            [5, 6, 7, 8, 9],
            [5, 6, 7, 10, 3],
            [11, 12, 3, 3, 3],
            [11, 13, 14, 3, 3],
        ],
        position_ids=[[0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 1, 0, 0, 0], [0, 1, 2, 0, 0]],
        segment_ids=[[1] * 5, [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        branch_ids=[[0] * 5] * 4,
        ends=[4, 11, 8, 17],
        logit_positions=[1, 2, 3, 10, 6, 7, 15, 16],
        compared=[[3, 11], [8, 16]],
        num_tokens=14,
        num_attended=15 + 10 + 3 + 6,
        **SAME,
    )


LAYOUTS = ("shared", "separate", "alone")


def random_rows(layout):
    pairs = [*ragged_pairs(7, seed=5), *with_a_prefix(), Answers([], [5, 6], [7])]
    if layout == "alone":
        return [[pair] for pair in pairs]
    return [pairs[:3], pairs[3:4], pairs[4:]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_is_where_a_walk_along_its_sequence_finds_it(layout):
    rows = random_rows(layout)
    batch = collate(layout, *rows)
    pairs = [pair for row in rows for pair in row]
    sequences = [p.sequences[0] for p in pairs] + [p.sequences[1] for p in pairs]
    tokens, width = batch.input_ids.flatten().tolist(), batch.input_ids.shape[1]
    positions = batch.position_ids.flatten().tolist()
    segments = batch.segment_ids.flatten().tolist()
    branches = batch.branch_ids.flatten().tolist()
    count = len(pairs)
    target_ids, expected_owner, expected_from, expected_compared = [], [], [], []
    walks = []
    for number, sequence in enumerate(sequences):
        # Walk back from the end: the token before is the nearest one to the left, one position
        # lower, in the same row and segment, on the same branch or on none.
        place = batch.ends[number].item()
        walk = [place]
        while positions[walk[0]] > 0:
            here = walk[0]
            walk.insert(
                0,
                next(
                    p
                    for p in range(here - 1, -1, -1)
                    if p // width == here // width
                    and segments[p] == segments[here]
                    and positions[p] == positions[here] - 1
                    and branches[p] in (0, branches[here])
                ),
            )
        assert [tokens[p] for p in walk] == sequence
        walks.append(walk)
        begin = len(pairs[number % count].prompt)
        for t in range(max(1, begin), len(sequence)):
            target_ids.append(sequence[t])
            expected_from.append(walk[t - 1])
            expected_owner.append(number)
    for pair, chosen, rejected in zip(pairs, walks[:count], walks[count:], strict=True):
        left, right = pair.sequences
        differ = False
        for t in range(min(len(left), len(right))):
            differ = differ or left[t] != right[t]
            if differ:
                expected_compared.append((chosen[t], rejected[t]))
    check(
        batch,
        target_ids=target_ids,
        owner=expected_owner,
        logit_positions=expected_from,
        compared=[list(each) for each in zip(*expected_compared, strict=True)],
        margins=torch.tensor([pair.margin for pair in pairs]).tolist(),
        num_samples=count,
        num_targets=len(target_ids),
        num_tokens=sum(s > 0 for s in segments),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attended_pairs_are_those_that_the_mask_lets_through(layout):
    batch = collate(layout, *random_rows(layout))
    mask = block_causal_mask(batch.segment_ids, torch.float32, branch_ids=batch.branch_ids)
    real = batch.segment_ids > 0
    assert batch.num_attended == int((mask[:, 0] == 0)[real].sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_a_pair_are_known_before_it_is_laid_out(layout, tmp_path):
    pairs = [pair.sample() for pair in ragged_pairs(5)]
    lengths = PairCollator(0, layout).counts(stored(tmp_path, pairs)).tokens
    counted = [PairCollator(0, layout)([[pair]]).num_tokens for pair in pairs]
    assert lengths.tolist() == counted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_has_a_shape_and_nothing_else(layout):
    batch = PairCollator(7, layout).empty()
    check(batch, input_ids=[[7]], position_ids=[[0]], segment_ids=[[0]], branch_ids=[[0]])
    counts = (batch.num_targets, batch.num_tokens, batch.num_samples, batch.num_attended)
    assert counts == (0, 0, 0, 0)
    names = "ends answer_lengths logit_positions target_ids owner compared_pair margins reference"
    for name in names.split():
        assert getattr(batch, name).shape == (0,), name
    assert batch.compared.shape == (2, 0)
    assert {batch.ends.dtype, batch.target_ids.dtype, batch.compared.dtype} == {torch.int64}


def test_width_can_be_rounded_up_and_several_pairs_do_not_stand_alone():
    assert collate("shared", [FIRST], multiple_of=8).input_ids.shape == (1, 8)
    assert collate("alone", [FIRST], multiple_of=8).input_ids.shape == (2, 8)
    with pytest.raises(AssertionError, match="a row of its own"):
        collate("alone", [FIRST, SECOND])


def test_moving_a_batch_moves_its_tensors_and_keeps_its_counts():
    moved = collate("shared", [FIRST]).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 13
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.num_targets == 5


def test_reference_not_known_is_nan():
    pair = Answers([5], [6], [7]).sample()
    assert PairCollator(0, "shared")([[pair]]).reference.isnan().all()


def test_pair_views_are_the_sequences_it_was_made_of():
    for pair in [*ragged_pairs(9), *with_a_prefix()]:
        sample = pair.sample()
        chosen, rejected = pair.sequences
        assert (sample.chosen.tolist(), sample.rejected.tolist()) == (chosen, rejected)
        assert sample.prompt.tolist() == pair.prompt
        alike = sample.shared_length - len(pair.prompt)
        assert sample.num_supervised == len(pair.chosen) + len(pair.rejected) - alike
        np.testing.assert_array_equal(sample.input_ids[: len(chosen)], chosen)


def test_mask_of_a_tree_by_hand():
    # a sample of one sequence, then a tree: 2 shared, 2 of one branch, 1 of the other; padding
    segments = torch.tensor([[1, 2, 2, 2, 2, 2, 0]])
    branches = torch.tensor([[0, 0, 0, 1, 1, 2, 0]])
    positions = torch.tensor([[0, 0, 1, 2, 3, 2, 0]])
    mask = block_causal_mask(segments, torch.float32, branch_ids=branches)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    # A window of two spans a position and the one before it in its sequence, not in the row.
    near = block_causal_mask(
        segments, torch.float32, window=2, branch_ids=branches, position_ids=positions
    )
    assert (near[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("layout", ["shared", "separate", "alone"])
def test_tight_rows_hold_the_same_pairs_under_the_same_numbers(layout):
    pairs = [each.sample() for each in ragged_pairs(40, longest=24)]
    pairs.sort(key=lambda pair: len(pair.input_ids), reverse=True)
    rows = [[pair] for pair in pairs]
    plain, tight = PairCollator(0, layout)(rows), PairCollator(0, layout, tight=True)(rows)
    assert tight.input_ids.shape[1] == plain.input_ids.shape[1]
    fewer = tight.input_ids.shape[0] < plain.input_ids.shape[0]
    assert fewer is (layout != "alone")
    for name in ("num_targets", "num_tokens", "num_samples", "num_attended"):
        assert getattr(tight, name) == getattr(plain, name)
    for name in ("target_ids", "owner", "compared_pair", "margins", "answer_lengths"):
        assert torch.equal(getattr(tight, name), getattr(plain, name))
    for name in ("ends", "logit_positions"):
        found, expected = (
            [
                each.flatten()[getattr(batch, name)].tolist()
                for each in (batch.input_ids, batch.position_ids, batch.branch_ids)
            ]
            for batch in (tight, plain)
        )
        assert found == expected
    real = tight.segment_ids > 0
    assert int(real.sum()) == plain.num_tokens
