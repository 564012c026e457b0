import io
import json
import random
import re

import pytest

from dschat_lora.data import json_stream
from dschat_lora.data.json_stream import JsonError, JsonStream


def random_value(draw, depth=0):
    kind = draw.randrange(5 if depth < 3 else 3)
    if kind == 3:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 4:
        return {f"k{n}": random_value(draw, depth + 1) for n in range(draw.randrange(4))}
    return draw.choice([True, None, -12.5e3, 123456, "a\nb", '"{', "\u4e2d" * draw.randrange(9)])


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_values_are_those_of_the_whole_text_however_little_is_read(monkeypatch, size):
    monkeypatch.setattr(json_stream, "READ_AT_A_TIME", size)
    draw = random.Random(size)
    values = [random_value(draw) for _ in range(60)]
    texts = [json.dumps(value, indent=draw.choice([None, 1])) for value in values]
    stream = JsonStream(io.StringIO(" \n".join(texts)))
    line = 1
    for value, text in zip(values, texts, strict=True):
        assert stream.next() == text[0]
        assert stream.line == line
        assert stream.value() == value
        line += text.count("\n") + 1
    assert stream.next() == ""


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("broken", ['{"a": }', '{"a": "b\n"}', '{"a" 1}', '{"a": [1,, 2]}', '{"a"'])
def test_an_error_is_where_the_parser_of_the_whole_text_finds_it(monkeypatch, size, broken):
    monkeypatch.setattr(json_stream, "READ_AT_A_TIME", size)
    before = '{"b":\n 1}\n  '
    with pytest.raises(json.JSONDecodeError) as expected:
        json.JSONDecoder().raw_decode(before + broken, len(before))
    stream = JsonStream(io.StringIO(before + broken))
    assert stream.value() == {"b": 1}
    with pytest.raises(JsonError) as found:
        stream.value()
    error = expected.value
    assert found.value.args == (error.lineno, error.colno, error.msg)


def test_what_was_read_is_forgotten(monkeypatch):
    monkeypatch.setattr(json_stream, "READ_AT_A_TIME", 50)
    stream = JsonStream(io.StringIO('{"a": "bcdefgh"}\n' * 1000))
    for _ in range(1000):
        stream.value()
        assert len(stream._text) < 200


def test_a_pattern_is_passed_only_where_it_matches():
    stream = JsonStream(io.StringIO(" [ 1]"))
    assert stream.skip_match(re.compile(r"\s*\{")) is None
    assert stream.skip_match(re.compile(r"\s*\["))
    assert stream.value() == 1
    assert not stream.skip(",")
    assert stream.skip("]")
