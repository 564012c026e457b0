"""Pieces of an answer as OpenAI's fields, with tokenizers that have calls among special tokens."""

import json

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from dschat_lora.addons.serving.endpoint.turns import Piece, Turn, token_bytes
from dschat_lora.assets import BUNDLED_MODEL


@pytest.fixture(scope="module")
def tokenizer():
    bundled = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    special = ["[TOOL_CALLS]", "<|im_end|>"]
    bundled.add_tokens([AddedToken(t, special=True) for t in special], special_tokens=True)
    bundled.add_tokens([AddedToken("<tool_call>", special=False)])
    return bundled


def turn_of(tokenizer, text, *, at_once, **options):
    """Text, calls and finish of an answer, whose end is a special token."""
    turn = Turn(tokenizer, "chat", reads_calls=True, **options)
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    visible = tokenizer.decode(ids, skip_special_tokens=True)
    pieces = [Piece(visible, len(ids), "stop", ids=tuple(ids))]
    if not at_once:
        known, pieces = "", []
        for number, token in enumerate(ids):
            now = tokenizer.decode(ids[: number + 1], skip_special_tokens=True)
            finish = "stop" if number == len(ids) - 1 else None
            pieces.append(Piece(now[len(known) :], number + 1, finish, ids=(token,)))
            known = now
    deltas = [turn.add(piece) for piece in pieces]
    calls = [call for delta in deltas for call in delta.calls]
    return "".join(delta.text for delta in deltas), calls, deltas[-1].finish


@pytest.mark.smoke
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('I see.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "I see."),
        ('I see. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "I see."),
        ('{"name": "f", "parameters": {"a": 1}}', ""),
    ],
    ids=["Mistral", "Hermes", "Llama"],
)
def test_calls_behind_special_tokens_are_found_however_the_answer_comes(
    tokenizer, text, content, at_once
):
    said, calls, finish = turn_of(tokenizer, text, at_once=at_once)
    assert (said, finish) == (content, "tool_calls")
    assert [call["function"]["name"] for call in calls] == ["f"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}


def test_ids_of_calls_depend_on_the_prompt_and_the_tokens_alone(tokenizer):
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = [
        turn_of(tokenizer, said, at_once=at_once, prompt=prompt)[1][0]["id"]
        for said, at_once, prompt in (
            (text, True, [5]),
            (text, False, [5]),
            (text, True, [6]),
            (f"a {text}", True, [5]),
        )
    ]
    assert ids[0] == ids[1]
    assert len({*ids}) == 3


def test_bytes_of_tokens_make_characters_that_they_share(tokenizer):
    text = "a \u4e2d\U0001f600"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids)
    assert b"".join(token_bytes(tokenizer, token) for token in ids).strip() == text.encode()
