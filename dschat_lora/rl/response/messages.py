"""Prompts and responses as messages."""

import json
from collections.abc import Callable
from typing import Any

from dschat_lora.data.tool_calls import parse_answer
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.response.response import Response


def messages_after_prompt(response: Response, decode: Callable[..., str]) -> list[dict[str, Any]]:
    """The actor's turns, and what its environment said between them.

    A turn with tool calls, and any where the row has ``tools``, is parsed as by TRL; others are
    text as it was drawn. A bare JSON object is no call where the row has no tools.
    """
    turn = response.last_turn
    text, end = decode(list(turn), skip_special_tokens=True), len(turn)
    while end and not decode(list(turn[end - 1 : end]), skip_special_tokens=True):
        end -= 1  # special tokens that end it
    before = (*response.prompt, *response.tokens[: len(response.tokens) - len(turn)])
    in_thought = decode(list(before[-16:])).rstrip().endswith("<think>")
    said = parse_answer(decode(list(turn[:end])), in_thought=in_thought)
    has_tools = json.loads(response.columns or b"{}").get("tools")
    if not has_tools and ("tool_calls" not in said or text.lstrip().startswith("{")):
        said = {"role": "assistant", "content": text}
    return [*json.loads(response.earlier or b"[]"), said]


def prompt_messages(response: Response, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    row = json.loads(response.columns or b"{}")
    return as_messages(prompt_of(row, tokenizer.decode(response.prompt)))


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def prompt_of(row: dict[str, Any], text: str | None) -> Any:
    """The prompt as the row has it, text or messages; ``text`` where it has another shape.

    Of messages with answers it is what the model reads: all before the last answer.
    """
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    given = prompt if isinstance(prompt, list) else []
    more = row.get("completion" if given else "messages")
    if not (given or isinstance(more, list)):
        return text
    messages = [*given, *(more if isinstance(more, list) else [])]
    answers = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
    return messages[: max(len(given), *answers[-1:])] if answers else messages
