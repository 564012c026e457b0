from itertools import pairwise
from random import Random

import pytest
from hand_tokenizers import build_byte_tokenizer, build_metaspace_tokenizer
from transformers import PreTrainedTokenizerFast

from dschat_lora.data.chat import Span
from dschat_lora.data.encoder import call, make_encoder
from dschat_lora.data.records import TextRecord
from dschat_lora.data.tokenize import TokenRule, tokenize

BOS, EOS, IGNORED = 1, 2, -100


def make_record(*texts):
    """Alternating context and answer."""
    spans = tuple(Span(text, target=index % 2 == 1) for index, text in enumerate(texts))
    return TextRecord("f.jsonl:3", "prompt-completion", spans)


def run(
    record,
    tokenizer,
    *,
    max_seq_len=100,
    overlong="drop",
    train_on_prompt=False,
    eos_id=EOS,
    eos_after_prompt=False,
):
    rule = TokenRule(
        eos_id, max_seq_len, overlong, train_on_prompt, eos_after_prompt=eos_after_prompt
    )
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    return result


def ids_and_labels(*args, **options):
    sample = run(*args, **options).sample
    return sample.input_ids.tolist(), sample.labels.tolist()


def letters(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(list(text))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_a_sequence_is_prompt_completion_and_one_end_whatever_the_tokenizer_adds(bos, eos):
    tokenizer = build_byte_tokenizer(bos=bos, eos=eos)
    front = [BOS] if bos else []
    prompt, completion = letters(tokenizer, "ab"), letters(tokenizer, "cd")
    ids, labels = ids_and_labels(make_record("ab", "cd"), tokenizer)
    assert ids == front + prompt + completion + [EOS]
    assert labels == [IGNORED] * len(front + prompt) + completion + [EOS]


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_an_end_after_the_prompt_stands_once_and_bears_no_loss_of_its_own(train_on_prompt):
    tokenizer = build_byte_tokenizer()
    prompt, completion = letters(tokenizer, "ab"), letters(tokenizer, "cd")
    options = {"eos_after_prompt": True, "train_on_prompt": train_on_prompt}
    ids, labels = ids_and_labels(make_record("ab", "cd"), tokenizer, **options)
    assert ids == [*prompt, EOS, *completion, EOS]
    # microsoft/LoRA's two masks: of the text alone (clm), or of all but the first token (jlm)
    supervised = 5 if train_on_prompt else 3
    assert labels == [IGNORED] * (6 - supervised) + ids[6 - supervised :]


def test_a_completion_that_would_merge_with_the_prompt_is_tokenised_alone():
    tokenizer = build_byte_tokenizer(bos=True, merges=[("b", "c")])
    assert tokenizer("abc").input_ids == [BOS, *letters(tokenizer, ["a", "bc"])]
    ids, _ = ids_and_labels(make_record("ab", "cd"), tokenizer)
    assert ids == [BOS, *letters(tokenizer, "abcd"), EOS]


def test_sentencepiece_adds_no_false_space_before_the_completion():
    tokenizer = build_metaspace_tokenizer()
    ids, labels = ids_and_labels(make_record("ab", "cd"), tokenizer)
    assert ids == [*letters(tokenizer, "\u2581abcd"), EOS]
    assert labels[3:] == [*letters(tokenizer, "cd"), EOS]
    ids, _ = ids_and_labels(make_record("ab", " cd"), tokenizer)
    assert ids == [*letters(tokenizer, "\u2581ab\u2581cd"), EOS]


def test_a_beginning_in_the_text_is_not_doubled_but_counted():
    tokenizer = build_byte_tokenizer(bos=True)
    plain = run(make_record("ab", "c"), tokenizer)
    doubled = run(make_record("<s>ab", "c"), tokenizer)
    assert doubled.sample.input_ids.tolist() == plain.sample.input_ids.tolist()
    assert (plain.doubled_bos, doubled.doubled_bos) == (False, True)
    without = build_byte_tokenizer(bos=False)
    assert run(make_record("<s>ab", "c"), without).sample.input_ids[:2].tolist() != [BOS, BOS]
    assert not run(make_record("<s>ab", "c"), without).doubled_bos


def test_an_end_that_the_answer_brings_is_not_doubled():
    tokenizer = build_byte_tokenizer()
    assert ids_and_labels(make_record("ab", "c</s>"), tokenizer) == ids_and_labels(
        make_record("ab", "c"), tokenizer
    )


def test_the_end_is_supervised_when_it_is_also_the_padding_token():
    tokenizer = build_byte_tokenizer(pad="</s>")
    assert tokenizer.pad_token_id == EOS
    _, labels = ids_and_labels(make_record("ab", "c"), tokenizer)
    assert labels[-1] == EOS


def test_the_end_may_be_another_token_than_the_tokenizers_own():
    ids, labels = ids_and_labels(make_record("ab", "c"), build_byte_tokenizer(), eos_id=0)
    assert (ids[-1], labels[-1]) == (0, 0)


def test_every_answer_of_a_conversation_is_supervised_and_nothing_else():
    tokenizer = build_byte_tokenizer(bos=True)
    ids, labels = ids_and_labels(make_record("q", "a</s>", "r", "b</s>"), tokenizer)
    q, a, r, b = letters(tokenizer, "qarb")
    assert ids == [BOS, q, a, EOS, r, b, EOS]
    assert labels == [IGNORED, IGNORED, a, EOS, IGNORED, b, EOS]


def test_a_later_turn_that_would_merge_is_tokenised_alone_and_the_next_goes_on():
    tokenizer = build_byte_tokenizer(merges=[("a", "r")])
    ids, labels = ids_and_labels(make_record("q", "a", "rs", "b"), tokenizer)
    q, a, r, s, b = letters(tokenizer, "qarsb")
    assert ids == [q, a, r, s, b, EOS]
    assert labels == [IGNORED, a, IGNORED, IGNORED, b, EOS]


def test_text_rows_and_train_on_prompt_supervise_all_but_the_first_token():
    tokenizer = build_byte_tokenizer()
    a, b, c = letters(tokenizer, "abc")
    text = TextRecord("f:1", "text", (Span("abc", target=True),))
    assert ids_and_labels(text, tokenizer)[1] == [IGNORED, b, c, EOS]
    both = ids_and_labels(make_record("ab", "c"), tokenizer, train_on_prompt=True)
    assert both == ([a, b, c, EOS], [IGNORED, b, c, EOS])


@pytest.mark.parametrize(("size", "dropped"), [(5, False), (4, True)])
def test_drop_leaves_out_what_is_longer_than_the_limit_and_nothing_else(size, dropped):
    result = run(make_record("ab", "cd"), build_byte_tokenizer(), max_seq_len=size)
    assert (result.sample is None, result.length, result.truncated) == (dropped, 5, False)


@pytest.mark.parametrize("size", [3, 4])
def test_a_truncated_completion_gets_no_end(size):
    tokenizer = build_byte_tokenizer()
    options = {"max_seq_len": size, "overlong": "truncate"}
    ids, labels = ids_and_labels(make_record("ab", "cd"), tokenizer, **options)
    assert ids == letters(tokenizer, "abcd")[:size]
    assert EOS not in ids + labels
    assert run(make_record("ab", "cd"), tokenizer, **options).truncated


def test_a_truncated_row_without_a_target_left_is_dropped():
    result = run(
        make_record("ab", "cd"), build_byte_tokenizer(), max_seq_len=2, overlong="truncate"
    )
    assert result.sample is None
    assert not result.truncated


def test_an_overlong_row_is_an_error_if_asked_for():
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        run(make_record("ab", "cd"), build_byte_tokenizer(), max_seq_len=4, overlong="error")
    assert str(error.value) == (
        "f.jsonl:3: 5 tokens are more than --max_seq_len 4; raise it, or choose "
        "--overlong split, drop or truncate"
    )


def test_records_of_different_shape_keep_their_own_tokens():
    tokenizer = build_byte_tokenizer()
    records = [make_record("a", "b"), TextRecord("", "text", (Span("c", target=True),))]
    records += [make_record("d", "e", "f", "g")]
    results = tokenize(records, make_encoder(tokenizer), TokenRule(EOS, 9, "drop", False))
    got = [result.sample.input_ids.tolist() for result in results]
    assert got == [[*letters(tokenizer, text), EOS] for text in ("ab", "c", "defg")]


def test_rollouts_see_the_prompt_tokens_of_training():
    tokenizer = build_byte_tokenizer(bos=True, eos=True)
    (prompt,) = make_encoder(tokenizer).encode(["ab"])
    ids, labels = ids_and_labels(make_record("ab", "cd"), tokenizer)
    assert prompt == [i for i, label in zip(ids, labels, strict=True) if label == IGNORED]


def test_what_a_tokenizer_adds_is_found_without_latin_letters():
    tokenizer = build_byte_tokenizer(bos=True, eos=True, letters="12")
    assert tokenizer("a").input_ids == [BOS, EOS]
    encoder = make_encoder(tokenizer)
    assert (encoder.bos, encoder.suffix) == ((BOS,), 1)


class LowerCase(PreTrainedTokenizerFast):
    """Reads a text in a way of its own."""

    def _encode_plus(self, text, *args, **options):
        return super()._encode_plus([each.lower() for each in text], *args, **options)


def read_by_transformers(tokenizer, texts, special):
    return tokenizer(texts, add_special_tokens=special)["input_ids"]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "tokenizer",
    [
        build_byte_tokenizer(bos=True, eos=True, merges=[("a", "b")]),
        build_byte_tokenizer(bos=True),
        build_metaspace_tokenizer(),
        LowerCase(tokenizer_object=build_byte_tokenizer().backend_tokenizer),
    ],
)
def test_tokens_are_those_that_transformers_gives(tokenizer, special):
    texts = ["ab ba A", "", "<s> ab</s>  c", "\u4e2d\U0001f600 e\u0301"]
    expected = read_by_transformers(tokenizer, texts, special)
    assert call(tokenizer, texts, add_special_tokens=special) == expected


def test_what_a_tokenizer_file_says_of_cutting_and_padding_cuts_and_pads_nothing():
    tokenizer = build_byte_tokenizer()
    expected = read_by_transformers(tokenizer, ["abcdef", "a"], True)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    assert call(tokenizer, ["abcdef", "a"], add_special_tokens=True) == expected


def test_special_tokens_are_read_as_text_where_the_tokenizer_does_so():
    tokenizer = build_byte_tokenizer()
    tokenizer.split_special_tokens = True
    (ids,) = call(tokenizer, ["a</s>"], add_special_tokens=True)
    assert tokenizer.convert_ids_to_tokens(ids) == list("a</s>")


def test_a_tokenizer_without_vocabulary_is_an_error():
    with pytest.raises(ValueError, match=r"finds no token in any of .*; is its vocabulary empty"):
        make_encoder(build_byte_tokenizer(letters=""))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_long_text_is_cut_into_pieces_that_teach_each_token_once(size):
    tokenizer, texts = build_byte_tokenizer(), Random(size)
    for _ in range(30):
        text = "".join(texts.choices("abcdefgh ", k=texts.randint(1, 40)))
        record = TextRecord("f.txt:1", "text", (Span(text, target=True),))
        whole = run(record, tokenizer).sample.input_ids.tolist()
        samples = run(record, tokenizer, max_seq_len=size, overlong="split").samples
        assert all(2 <= len(sample.input_ids) <= size for sample in samples)
        learnt = [
            (sample.input_ids[: place + 1].tolist()[-2:])
            for sample in samples
            for place, label in enumerate(sample.labels)
            if label != IGNORED
        ]
        assert learnt == [list(pair) for pair in pairwise(whole)], "each after the one before it"


def test_what_is_no_plain_text_is_not_cut_into_pieces():
    result = run(make_record("ab", "cdef"), build_byte_tokenizer(), max_seq_len=4, overlong="split")
    assert (result.samples, result.length) == ((), 7)
