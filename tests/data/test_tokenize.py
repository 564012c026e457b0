"""Tokens of records: what is learnt of samples, of pairs and of single answers, by tables."""

import math
from itertools import pairwise, permutations
from random import Random

import pytest
from hand_tokenizers import build_byte_tokenizer, build_metaspace_tokenizer
from transformers import PreTrainedTokenizerFast

from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.encoder import call, make_encoder
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.tokenize import TokenRule, tokenize

BOS, EOS, IGNORED = 1, 2, -100
TOKENIZERS = {
    "": build_byte_tokenizer(),
    "^": build_byte_tokenizer(bos=True),
    "$": build_byte_tokenizer(eos=True),
    "^$": build_byte_tokenizer(bos=True, eos=True),
    "pads by $": build_byte_tokenizer(pad="</s>"),
    "bc": build_byte_tokenizer(bos=True, eos=True, merges=[("b", "c")]),
    "ar": build_byte_tokenizer(merges=[("a", "r")]),
    "_": build_metaspace_tokenizer(),  # as SentencePiece, a mark for a space
}
RECORDS = {"samples": "prompt-completion", "pairs": "preference", "unpaired": "unpaired preference"}


def make_record(texts, kind="samples", **more):
    """Alternating context and answer, with ``|`` between, and the other answer behind ``||``."""
    texts, _, other = texts.partition("||")
    spans = tuple(Span(text, target=n % 2 == 1) for n, text in enumerate(texts.split("|")))
    other = {"pairs": {"rejected": other}, "unpaired": {"mismatched": other}}.get(kind, {})
    return TextRecord("f.jsonl:3", RECORDS[kind], spans, **other, **more)


def run(record, tokenizer, kind="samples", **options):
    rule = {"eos_id": EOS, "max_seq_len": 100, "overlong": "drop", "train_on_prompt": False}
    rule = TokenRule(**rule | options, kind=kind)
    (result,) = tokenize([record], make_encoder(tokenizer), rule)
    return result


def read(tokenizer, text):
    """Tokens of letters, ``^`` and ``$``, and labels: those in brackets, else none."""
    ids, labels, learnt = [], [], False
    for letter in text:
        if letter in "[]":
            learnt = letter == "["
            continue
        name = {"^": "<s>", "$": "</s>", "_": "\u2581"}.get(letter, letter)
        ids.append(tokenizer.convert_tokens_to_ids(name))
        labels.append(ids[-1] if learnt else IGNORED)
    return ids, labels


def facts_of(result):
    names = ("truncated", "doubled_bos", "identical")
    return " ".join(name for name in names if getattr(result, name))


FRONTS = {"": "", "^": "^", "$": "", "^$": "^"}  # what tokenizers add before a text
TRUNCATE = {"overlong": "truncate"}


@pytest.mark.parametrize(
    ("name", "texts", "options", "expected", "facts"),
    [
        # Prompt, completion and one end, whatever the tokenizer adds or the answer brings.
        *((name, "ab|cd", {}, f"{front}ab[cd$]", "") for name, front in FRONTS.items()),
        ("", "ab|c</s>", {}, "ab[c$]", ""),
        ("pads by $", "ab|c", {}, "ab[c$]", ""),
        # microsoft/LoRA's two masks: of the text alone (clm), or of all but the first token (jlm)
        ("", "ab|cd", {"eos_after_prompt": True}, "ab$[cd$]", ""),
        ("", "ab|cd", {"eos_after_prompt": True, "train_on_prompt": True}, "a[b$cd$]", ""),
        ("", "ab|c", {"train_on_prompt": True}, "a[bc$]", ""),
        # What would merge with the prompt is tokenised alone, and gets no false space.
        ("bc", "ab|cd", {}, "^ab[cd$]", ""),
        ("_", "ab|cd", {}, "_ab[cd$]", ""),
        ("_", "ab| cd", {}, "_ab[_cd$]", ""),
        # A beginning in the text is not doubled, but counted.
        ("^", "<s>ab|c", {}, "^ab[c$]", "doubled_bos"),
        ("", "<s>ab|c", {}, "^ab[c$]", ""),
        # Every answer of a conversation is learnt; a turn that would merge is tokenised alone.
        ("^", "q|a</s>|r|b</s>", {}, "^q[a$]r[b$]", ""),
        ("ar", "q|a|rs|b", {}, "q[a]rs[b$]", ""),
        # What is too long is dropped, or cut and then has no end.
        ("", "ab|cd", {"max_seq_len": 5}, "ab[cd$]", ""),
        ("", "ab|cd", {"max_seq_len": 4}, None, ""),
        ("", "ab|cd", {"max_seq_len": 4, "overlong": "split"}, None, ""),
        ("", "ab|cd", {"max_seq_len": 4} | TRUNCATE, "ab[cd]", "truncated"),
        ("", "ab|cd", {"max_seq_len": 3} | TRUNCATE, "ab[c]", "truncated"),
        ("", "ab|cd", {"max_seq_len": 2} | TRUNCATE, None, ""),
    ],
)  # fmt: skip
def test_samples(name, texts, options, expected, facts):
    tokenizer = TOKENIZERS[name]
    result = run(make_record(texts), tokenizer, **options)
    assert facts_of(result) == facts
    if options.get("max_seq_len"):
        assert result.length == 5
    if expected is None:
        assert result.sample is None
        return
    ids, labels = read(tokenizer, expected)
    assert (result.sample.input_ids.tolist(), result.sample.labels.tolist()) == (ids, labels)
    if "|" in texts and not options and "<s>" not in texts and texts.count("|") == 1:
        (prompt,) = make_encoder(tokenizer).encode([texts.partition("|")[0]])
        assert prompt == [i for i, label in zip(ids, labels, strict=True) if label == IGNORED]


@pytest.mark.parametrize(
    ("name", "texts", "options", "chosen", "rejected", "facts"),
    [
        *(
            (name, "ab|cd||efg", {}, f"{front}ab[cd$]", f"{front}ab[efg$]", "")
            for name, front in FRONTS.items()
        ),
        *(
            ("bc", f"ab|{one}||{other}", {}, f"^ab[{one}$]", f"^ab[{other}$]", "")
            for one, other in permutations(("cd", "cx", "x"), 2)
        ),
        ("_", "ab|cd|| ef", {}, "_ab[cd$]", "_ab[_ef$]", ""),
        ("", "ab|c</s>||d", {}, "ab[c$]", "ab[d$]", ""),
        ("", "ab|c||d</s>", {}, "ab[c$]", "ab[d$]", ""),
        ("^", "q|a</s>|r|b||x", {}, "^qa$r[b$]", "^qa$r[x$]", ""),
        ("^", "<s>ab|c||d", {}, "^ab[c$]", "^ab[d$]", "doubled_bos"),
        # One answer goes on from the other.
        ("", "ab|c</s>||c</s>d", {}, "ab[c$]", "ab[c$d$]", ""),
        ("", "ab|c</s>d||c</s>", {}, "ab[c$d$]", "ab[c$]", ""),
        # Either may be too long.
        ("", "ab|cd||e", {"max_seq_len": 5}, "ab[cd$]", "ab[e$]", ""),
        ("", "ab|e||cd", {"max_seq_len": 5}, "ab[e$]", "ab[cd$]", ""),
        ("", "ab|cd||e", {"max_seq_len": 4}, None, None, ""),
        ("", "ab|e||cd", {"max_seq_len": 4}, None, None, ""),
        ("", "ab|cdef||x", {"max_seq_len": 4} | TRUNCATE, "ab[cd]", "ab[x$]", "truncated"),
        ("", "ab|c||cdef", {"max_seq_len": 4} | TRUNCATE, "ab[c$]", "ab[cd]", "truncated"),
        ("", "ab|cdx||cdy", {"max_seq_len": 5} | TRUNCATE, "ab[cdx]", "ab[cdy]", "truncated"),
        # Nothing tells them apart, once they are cut.
        ("", "ab|c||c", TRUNCATE, None, None, "identical"),
        ("", "ab|cdx||cdy", {"max_seq_len": 4} | TRUNCATE, None, None, "identical"),
        ("", "ab|c||d", {"max_seq_len": 2} | TRUNCATE, None, None, "identical"),
        ("", "ab|c||d", {"max_seq_len": 1} | TRUNCATE, None, None, "identical"),
    ],
)  # fmt: skip
def test_pairs(name, texts, options, chosen, rejected, facts):
    tokenizer = TOKENIZERS[name]
    result = run(make_record(texts, "pairs"), tokenizer, "pairs", **options)
    assert facts_of(result) == facts
    if chosen is None:
        assert result.sample is None
        return
    pair = result.sample
    for side, expected in ((pair.chosen, chosen), (pair.rejected, rejected)):
        ids, _ = read(tokenizer, expected)
        assert side.tolist() == ids
        assert pair.prompt.tolist() == read(tokenizer, expected.partition("[")[0])[0]
    assert pair.ends_in(EOS) == (chosen[-2] == rejected[-2] == "$")
    if not options and texts.count("|") == 3:
        prompt, own, _, other = texts.split("|")
        for side, answer in ((pair.chosen, own), (pair.rejected, other)):
            training = run(make_record(f"{prompt}|{answer}"), tokenizer)
            assert side.tolist() == training.sample.input_ids.tolist()


def test_a_pair_is_kept_as_a_tree_whose_beginning_may_go_on_into_the_answers():
    tokenizer = build_byte_tokenizer()
    pair = run(make_record("ab|cde||cdfg", "pairs", margin=1.5), tokenizer, "pairs").sample
    assert pair.input_ids.tolist() == read(tokenizer, "abcde$fg$")[0]
    assert (pair.prompt_length, pair.shared_length, pair.chosen_length) == (2, 4, 2)
    assert pair.num_supervised == 2 + 2 + 3  # c d, e and its end, f g and its end
    assert not pair.ends_in(0)
    assert pair.margin == 1.5
    plain = run(make_record("a|b||c", "pairs"), tokenizer, "pairs").sample
    assert plain.margin == 0.0
    assert all(map(math.isnan, plain.reference))


@pytest.mark.parametrize(
    ("texts", "options", "own", "mismatched", "facts"),
    [
        ("ab|cd||efg", {}, "ab[cd$]", "abefg$", ""),
        # A mismatched answer is cut, and makes no row too long.
        ("ab|c||defghij", {"max_seq_len": 5}, "ab[c$]", "abdef", ""),
        ("ab|cdefgh||x", {"max_seq_len": 5}, None, None, ""),
        ("abcdefg|c||x", {"max_seq_len": 5}, None, None, ""),
        ("ab|cdefgh||x", {"max_seq_len": 5} | TRUNCATE, "ab[cde]", "abx$", "truncated"),
        ("abcdefg|c||x", {"max_seq_len": 5} | TRUNCATE, None, None, ""),
    ],
)
@pytest.mark.parametrize("label", [True, False])
def test_single_answers(texts, options, own, mismatched, facts, label):
    tokenizer = TOKENIZERS[""]
    result = run(make_record(texts, "unpaired", label=label), tokenizer, "unpaired", **options)
    assert facts_of(result) == facts
    if own is None:
        assert result.sample is None
        return
    sample, (ids, labels) = result.sample, read(tokenizer, own)
    assert sample.input_ids.tolist() == ids
    assert sample.mismatched.tolist() == read(tokenizer, mismatched)[0]
    assert sample.prompt_length == labels.count(IGNORED)
    assert (sample.label, sample.ends_in(EOS)) == (int(label), own[-2] == "$")
    assert sample.num_supervised == len(ids) - sample.prompt_length


@pytest.mark.parametrize(
    ("texts", "kind"),
    [("ab|cd", "samples"), ("ab|cd||e", "pairs"), ("ab|e||cd", "pairs"), ("ab|cd||x", "unpaired")],
)
def test_an_overlong_row_is_an_error_if_asked_for(texts, kind):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        run(make_record(texts, kind), TOKENIZERS[""], kind, max_seq_len=4, overlong="error")
    assert str(error.value) == (
        "f.jsonl:3: 5 tokens are more than --max_seq_len 4; raise it, or choose "
        "--overlong split, drop or truncate"
    )


def test_the_end_may_be_another_token_than_the_tokenizers_own():
    sample = run(make_record("ab|c"), TOKENIZERS[""], eos_id=0).sample
    assert (sample.input_ids[-1], sample.labels[-1]) == (0, 0)
    pair = run(make_record("a|c||d", "pairs"), TOKENIZERS[""], "pairs", eos_id=0).sample
    assert (pair.chosen[-1], pair.rejected[-1]) == (0, 0)
    assert EOS not in pair.input_ids


def test_messages_whose_format_ends_itself_have_one_end_and_the_prompt_of_training():
    tokenizer = TOKENIZERS["^"]
    chat = Chat(tokenizer, "</s>")
    user, *answers = (
        {"role": role, "content": content}
        for role, content in (("user", "q"), ("assistant", "a"), ("assistant", "bc"))
    )
    row = {"chosen": [user, answers[0]], "rejected": [user, answers[1]]}
    (record,) = to_records(parse_row(RawRow("f:7", row)), chat)
    pair = run(record, tokenizer, "pairs").sample
    for sequence, answer in zip((pair.chosen, pair.rejected), answers, strict=True):
        (training,) = to_records(parse_row(RawRow("f:7", {"messages": [user, answer]})), chat)
        own = run(training, tokenizer).sample
        assert sequence.tolist() == own.input_ids.tolist()
        assert pair.prompt.tolist() == own.prompt.tolist()
        assert sequence.tolist().count(EOS) == 1


def text_record(text):
    return TextRecord("f.txt:1", "text", (Span(text, target=True),))


def test_records_of_different_shape_keep_their_own_tokens():
    tokenizer = TOKENIZERS[""]
    records = [make_record("a|b"), text_record("ch"), make_record("d|e|f|g")]
    results = tokenize(records, make_encoder(tokenizer), TokenRule(EOS, 9, "drop", False))
    for result, expected in zip(results, ("a[b$]", "c[h$]", "d[e]f[g$]"), strict=True):
        sample = result.sample
        assert (sample.input_ids.tolist(), sample.labels.tolist()) == read(tokenizer, expected)


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
    with pytest.raises(ValueError, match=r"finds no token in any of .*; is the vocabulary empty"):
        make_encoder(build_byte_tokenizer(letters=""))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_long_text_is_cut_into_pieces_that_teach_each_token_once(size):
    tokenizer, texts = build_byte_tokenizer(), Random(size)
    for _ in range(30):
        text = "".join(texts.choices("abcdefgh ", k=texts.randint(1, 40)))
        record = text_record(text)
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
