"""Prompts of a chat in which special tokens that a user typed stay text."""

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.messages import Message, content_text
from dschat_lora.models.loading import Tokenizer


def chat_ids(
    messages: Sequence[Message],
    chat: Chat,
    encoder: Encoder,
    tokenizer: Tokenizer,
    *,
    most: int = 2**31,
) -> list[int]:
    """Tokens of messages up to the assistant's turn; only the template's special tokens are such.

    Those that stand in a message, such as ``<|im_end|>``, would let it forge turns of others. They
    are left out when the messages are rendered, and put in place as the tokens of their text.

    Raises:
        ValueError: if the chat template refuses the messages or changes their texts, the tokenizer
            cannot read a special token as text, one is spelt over several parts of a content, or
            there are more than ``most``.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: number for number, token in added if token.special}
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    mark = secrets.token_hex(8)  # that nobody knows
    typed: list[str] = []

    def hide(found: re.Match[str]) -> str:
        typed.append(found[0])
        return f"{mark}{len(typed) - 1};"

    hidden = _mapped(list(messages), pattern, hide)
    for message in hidden:
        content = message.get("content")
        if isinstance(content, list) and (found := pattern.search(content_text(content))):
            raise ValueError(f"{found[0]!r} is spelt over several parts of a content")
    if len(typed) > most:
        raise ValueError(f"they hold {len(typed)} special tokens, more than the model has room for")
    text = chat.render(hidden, add_generation_prompt=True)
    if not typed:
        return encoder.encode([text])[0]
    first, *rest = re.split(f"{mark}([0-9]+);", text)
    if len(rest) < 2 * len(typed):
        raise ValueError(f"the chat template changes texts, in which {typed[0]!r} is no token")
    as_text = {token: _as_text(token, special[token], tokenizer) for token in set(typed)}
    ids = encoder.encode([first])[0]
    for number, part in zip(rest[::2], rest[1::2], strict=True):
        ids += as_text[typed[int(number)]]
        ids += encoder.encode_alone(part) if part else []
    return ids


def _as_text(token: str, number: int, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer(token, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    if number in ids:
        raise ValueError(f"the tokenizer cannot read the special token {token!r} as text")
    return ids


def _mapped(value: Any, pattern: re.Pattern[str], hide: Callable[[re.Match[str]], str]) -> Any:
    """The value with ``hide`` in the place of matches in all its texts."""
    if isinstance(value, str):
        return pattern.sub(hide, value)
    if isinstance(value, list):
        return [_mapped(each, pattern, hide) for each in value]
    if isinstance(value, dict):
        return {
            pattern.sub(hide, str(name)): _mapped(each, pattern, hide)
            for name, each in value.items()
        }
    return value
