"""Messages that are taken, and the one line about those that are not."""

import pytest

from dschat_lora.data.messages import EmptyTextError, check_message, content_text

CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
PART = {"type": "text", "text": "a"}
FORM = '{"type": "text", "text": ...}'


def calling(arguments):
    return {"role": "assistant", "tool_calls": [CALL, {"name": "g", "arguments": arguments}]}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": [PART, PART]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "user", "content": ""},
    ],
)
def test_messages_of_today_are_taken(message):
    check_message("`messages` item 2", message)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("hi", "must have 'role' and 'content', found str"),
        ({"role": "user"}, "must have 'role' and 'content', found ['role']"),
        ({"role": 1, "content": "a"}, ": 'role' must be text, found int"),
        ({"role": "user", "content": None}, ": 'content' must be text, found NoneType"),
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            ": 'content' must be text, found NoneType",
        ),
        (
            {"role": "user", "content": [PART, {"type": "image", "url": "x"}]},
            ": part 2 of 'content' is 'image'; text alone is read",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            ": part 1 of 'content' is 'image_url'; text alone is read",
        ),
        (
            {"role": "user", "content": [{"type": "tool"}]},
            f": part 1 of 'content' must be {FORM}, found 'tool'",
        ),
        ({"role": "user", "content": ["a"]}, f": part 1 of 'content' must be {FORM}, found str"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            ': \'tool_calls\' must be a list of {"type": "function", "function": '
            '{"name": ..., "arguments": ...}}, found [{\'function\': {}}]',
        ),
        (
            calling('{"a": 1'),
            ": the arguments of 'g' are no JSON: Expecting ',' delimiter: line 1 column 8 (char 7)"
            "; found '{\"a\": 1'",
        ),
        (
            calling('{"a": 1, "a": 2}'),
            ": the arguments of 'g' are no JSON: an object has 'a' twice; "
            'found \'{"a": 1, "a": 2}\'',
        ),
        (calling("[1]"), ": the arguments of 'g' must be an object or its JSON, found '[1]'"),
        (calling("null"), ": the arguments of 'g' must be an object or its JSON, found 'null'"),
        (calling([1]), ": the arguments of 'g' must be an object or its JSON, found [1]"),
        (calling(0), ": the arguments of 'g' must be an object or its JSON, found 0"),
    ],
)
def test_others_are_named_with_what_they_should_be(message, reason):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        check_message("`messages` item 2", message)
    separator = "" if reason.startswith(":") else " "
    assert str(error.value) == f"`messages` item 2{separator}{reason}"


@pytest.mark.parametrize("content", [" ", [], [{"type": "text", "text": "\n"}]])
def test_an_answer_that_says_nothing_is_empty(content):
    with pytest.raises(EmptyTextError, match="the assistant's 'content' is empty"):
        check_message("`messages` item 2", {"role": "assistant", "content": content})


def test_parts_of_media_that_are_read_hold_nothing_but_their_type():
    message = {"role": "user", "content": [{"type": "image"}, PART]}
    check_message("`messages` item 2", message, ["image"])
    for part in ({"type": "image", "url": "x"}, {"type": "video"}):
        with pytest.raises(ValueError, match="part 1 of 'content' is"):
            check_message("m", {"role": "user", "content": [part, PART]}, ["image"])
    assert content_text(message["content"]) == PART["text"]
