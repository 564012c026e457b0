"""Text of tokens as they come, against the text of all of them."""

import random

import pytest
from transformers import AutoTokenizer

from dschat_lora.addons.serving.endpoint.text import TextStream
from dschat_lora.assets import BUNDLED_MODEL


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def streamed(tokenizer, ids, stop=(), *, strip=False):
    """The pieces, until a stop string."""
    stream, pieces = TextStream(tokenizer, stop, strip=strip), []
    for token in ids:
        pieces.append(stream.add(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@pytest.mark.parametrize(
    "text", ["Hello Gina, the sum is 12.", "caf\u00e9 \u4e2d\u6587 \U0001f600!", " a  b"]
)
def test_pieces_are_the_whole_text_and_cut_no_character(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 1


def test_tokens_of_no_text_and_broken_characters_end():
    """Bytes that never make a character are shown, not kept for ever."""

    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode(errors="replace")

    pieces = streamed(Bytes(), [0xE4] * 20 + [0x61])
    assert "".join(pieces).endswith("a")
    assert "".join(pieces).count("\ufffd") == 20
    assert "".join(streamed(Bytes(), [0xE4, 0xB8])) == "\ufffd"


class Letters:
    """One letter a token."""

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def letters(text):
    return [ord(letter) for letter in text]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\nHuman: two", ["\n\nHuman:"], "one"),
        ("abcabd", ["abd"], "abc"),
        ("aaab", ["aab"], "a"),
        ("abxcd", ["cd", "bx"], "a"),
        ("no stop", ["stops"], "no stop"),
        ("stop", ["stop"], ""),
    ],
)
def test_text_ends_before_the_first_stop_string(text, stop, expected):
    assert "".join(streamed(Letters(), letters(text), stop)) == expected


def test_a_stop_string_is_never_begun():
    generator = random.Random(0)
    for _ in range(300):
        text = "".join(generator.choices("ab", k=12))
        stop = ["".join(generator.choices("ab", k=generator.randint(1, 4)))]
        stream, shown = TextStream(Letters(), stop, strip=False), ""
        for token in letters(text):
            shown += stream.add(token)
            assert text.split(stop[0])[0].startswith(shown)
            if stream.stopped:
                break
        assert shown + stream.finish() == text.split(stop[0])[0]


def test_white_space_in_front_is_left_out_across_tokens():
    assert "".join(streamed(Letters(), letters(" \n a b "), strip=True)) == "a b "
