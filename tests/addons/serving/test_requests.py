"""Requests: chats whose last words are the assistant's, and temperatures."""

import math
from types import SimpleNamespace

import pytest

from data.chat_tokenizers import build_chat_tokenizer
from dschat_lora.addons.serving.config import AnswerConfig
from dschat_lora.addons.serving.endpoint import requests
from dschat_lora.addons.serving.endpoint.errors import ApiError
from dschat_lora.addons.serving.endpoint.requests import chat_request
from dschat_lora.addons.serving.endpoint.text import chat_ids
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder

USER = {"role": "user", "content": "One?"}


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<|im_start|>assistant\nTw"),
        ({"continue_final_message": True}, "<|im_start|>assistant\nTw"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "assistant\nTw"),
        ({"add_generation_prompt": True}, "Tw<|im_end|>\n<|im_start|>assistant\n"),
        ({"continue_final_message": False}, "Tw<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "Tw<|im_end|>\n"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message is for add_generation_prompt: false",
        ),
        ({"continue_final_message": 1}, "continue_final_message must be true or false"),
    ],
)
def test_a_request_says_whether_the_assistants_words_are_continued(fields, end):
    tokenizer = build_chat_tokenizer("qwen2_5")
    chat, encoder = make_chat(tokenizer), make_encoder(tokenizer)
    model = SimpleNamespace(
        name="m",
        limit=1000,
        vocabulary_size=len(tokenizer),
        tokenizer=tokenizer,
        chat_ids=lambda said, columns: chat_ids(said, chat, encoder, tokenizer, columns=columns),
    )
    defaults = SimpleNamespace(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=5)

    def ids(*messages):
        body = {"model": "m", "messages": list(messages), **fields}
        return chat_request(body, {"m": model}, defaults).prompts[0]

    asked = USER, {"role": "assistant", "content": "Tw"}
    if not end.startswith("continue"):
        assert tokenizer.decode(ids(*asked)).endswith(end)
        if not fields:
            assert tokenizer.decode(ids(*asked[:1])).endswith("assistant\n")
        return
    with pytest.raises(ApiError) as error:
        ids(*asked)
    assert end in str(error.value)


def test_only_the_assistants_words_can_be_continued_by_a_request():
    with pytest.raises(ApiError, match="is for a last message of the assistant's, with text"):
        requests._turn(requests.Fields({"continue_final_message": True}), [USER])


@pytest.mark.parametrize("value", [1e-300, 1e-7, -1.0, math.nan])
def test_a_temperature_that_overflows_is_refused(value):
    with pytest.raises(ValueError, match="temperature must be (at least|>=) 1e-06"):
        AnswerConfig(models=("base",), temperature=value)
    AnswerConfig(models=("base",), temperature=1e-6)
