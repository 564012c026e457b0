"""Text of a chat as tokens, where special tokens that a user typed stay text; tokens as text."""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat_lora.data.chat import Chat, ends_in_words
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.media import MediaReader, MediaRun, with_runs
from dschat_lora.data.messages import Message, content_text, with_arguments
from dschat_lora.models.loading import Tokenizer

TURN_FIELDS = ("add_generation_prompt", "continue_final_message")  # of a request, as in vLLM
_INCOMPLETE = "\ufffd"  # what a tokenizer writes for the first bytes of a character
_MOST_TOKENS = 8  # of a character; bytes that make none are shown as such


class ReadMessages(list[Message]):
    """Messages whose inputs beside text have been read, as ``values`` of a row have them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values["messages"])
        self.values = values


class MediaPrompt(list[int]):
    """Tokens with runs, which are held with it; ``shown`` has tokens of the vocabulary alone."""

    def __init__(self, ids: Sequence[int], runs: Sequence[MediaRun], shown: Sequence[int]) -> None:
        super().__init__(ids)
        self.runs, self.shown = runs, shown


def read_messages(
    messages: Sequence[Message], media: MediaReader | None, folder: Path | None = None
) -> Sequence[Message]:
    """The messages with what they hold beside text, by ``media``, read; files if in a ``folder``.

    Raises:
        ValueError: if something cannot be read.
    """
    if media is None:
        return messages
    values = media.row({"messages": list(messages)}, ["messages"], folder)
    return ReadMessages(values) if len(values) > 1 else messages


def chat_ids(
    messages: Sequence[Message],
    chat: Chat,
    encoder: Encoder,
    tokenizer: Tokenizer,
    *,
    columns: Mapping[str, Any] | None = None,
    most: int = 2**31,
) -> list[int]:
    """Tokens of messages up to the assistant's turn; only the template's special tokens are such.

    Those that stand in a message or a tool, such as ``<|im_end|>``, would let it forge turns of
    others. They are left out when the messages are rendered, and put in place as the tokens of
    their text. ``columns`` holds a request's ``tools``, ``chat_template_kwargs``,
    ``add_generation_prompt`` and ``continue_final_message``, if any; where it has neither of these
    two, the assistant's last words are continued. Of :class:`ReadMessages` they are a
    :class:`MediaPrompt`.

    Raises:
        ValueError: if the chat template refuses the messages, has no place for the tools, or
            changes their texts, the tokenizer cannot read a special token as text, one is spelt
            over several parts of a content or stands in ``chat_template_kwargs``, or there are more
            than ``most``.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: number for number, token in added if token.special}
    longest_first = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
    mark = secrets.token_hex(8)  # that nobody knows
    typed: list[str] = []

    def hide(match: re.Match[str]) -> str:
        typed.append(match[0])
        return f"{mark}{len(typed) - 1};"

    # Arguments that are JSON text may spell one by escapes.
    hidden = _mapped(list(map(with_arguments, messages)), pattern, hide)
    columns = columns or {}
    chat = _with_columns(chat, columns, pattern, hide)
    for message in hidden:
        content = message.get("content")
        if isinstance(content, list) and (split := pattern.search(content_text(content))):
            raise ValueError(f"{split[0]!r} is spelt over several parts of a content")
    if len(typed) > most:
        raise ValueError(f"they hold {len(typed)} special tokens, more than the model has room for")
    goes_on = continues(messages, columns)
    opens = columns.get("add_generation_prompt", not goes_on)
    text = chat.render(hidden, add_generation_prompt=opens, continue_final_message=goes_on)
    runs: Sequence[MediaRun] = ()
    if chat.media is not None and isinstance(messages, ReadMessages):
        (text,), runs = chat.media.insert([text], messages.values, whole=True)
    ids = _with_typed(text, typed, mark, special, encoder, tokenizer)
    if chat.media is None or not runs:
        return ids
    image = runs[0].token
    if ids.count(image) != sum(run.size for run in runs):
        name = tokenizer.convert_ids_to_tokens(image)
        raise ValueError(f"a text has {name!r}, which stands for an input beside text")
    return MediaPrompt(with_runs([ids], runs)[0], runs, ids)


def _with_typed(
    text: str,
    typed: Sequence[str],
    mark: str,
    special: Mapping[str, int],
    encoder: Encoder,
    tokenizer: Tokenizer,
) -> list[int]:
    """Tokens of a text with ``mark`` and a number in the place of each typed special token."""
    first, *rest = re.split(f"{mark}([0-9]+);", text)
    if len(rest) < 2 * len(typed):
        raise ValueError(f"the chat template changes texts, in which {typed[0]!r} is no token")
    as_text: dict[str, list[int]] = {}
    for token in set(typed):
        encoded = tokenizer(token, add_special_tokens=False, split_special_tokens=True)
        as_text[token] = encoded["input_ids"]
        if special[token] in as_text[token]:
            raise ValueError(f"the tokenizer cannot read the special token {token!r} as text")
    ids = encoder.encode([first])[0]
    for number, part in zip(rest[::2], rest[1::2], strict=True):
        ids += as_text[typed[int(number)]]
        ids += encoder.encode_alone(part) if part else []
    return ids


def continues(messages: Sequence[Message], columns: Mapping[str, Any]) -> bool:
    """Whether the assistant's last words are to be continued, by the request or by default."""
    asked: bool = columns.get("continue_final_message", "add_generation_prompt" not in columns)
    return asked and ends_in_words(messages)


def _with_columns(
    chat: Chat,
    columns: Mapping[str, Any],
    pattern: re.Pattern[str],
    hide: Callable[[re.Match[str]], str],
) -> Chat:
    """The chat with a request's tools, in which special tokens are hidden, and variables."""
    if not columns:
        return chat
    variables = json.dumps(columns.get("chat_template_kwargs"), ensure_ascii=False)
    if typed := pattern.search(variables):
        raise ValueError(f"chat_template_kwargs must not hold the special token {typed[0]!r}")
    chat = chat.with_columns(columns)
    if not columns.get("tools"):
        return chat
    if "tools" not in chat.template:
        raise ValueError("the chat template has no place for tools")
    return replace(chat, tools=_mapped(chat.tools, pattern, hide))


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


def held_back(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of a text that one of the strings may begin with."""
    longest = min(len(text), max(map(len, strings), default=0))
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(s.startswith(text[-n:]) for s in strings)), 0)


def decoded(tokenizer: Tokenizer, ids: Sequence[int], *, shown: bool) -> str:
    """The text of tokens as they are; special ones leave none unless they are ``shown``."""
    options = {"skip_special_tokens": not shown, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))


class TextStream:
    """Decodes tokens one by one; all pieces together are the text of all tokens at once.

    Text is held back while it may be part of a character or the beginning of a stop string.

    Args:
        tokenizer: of the model; special tokens leave no text unless they are ``shown``.
        stop: strings that end the text, which are left out of it.
        strip: leave out white space in front.

    Attributes:
        stopped: whether a stop string was met.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, strip: bool, shown: bool = False
    ) -> None:
        self._shown = shown
        self._tokenizer, self._stop, self._strip = tokenizer, tuple(stop), strip
        self._ids: list[int] = []
        self._start = self._read = 0  # a token's text depends on those from ``start`` on
        self._waiting = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE) and len(self._ids) - self._read < _MOST_TOKENS:
            return ""
        self._take(text)
        held = 0 if self.stopped else held_back(self._waiting, self._stop)
        cut = len(self._waiting) - held
        text, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return text

    def finish(self) -> str:
        """The rest, when no token follows."""
        if not self.stopped:
            self._take(self._new_text())
        text, self._waiting = self._waiting, ""
        return text

    def _new_text(self) -> str:
        known, text = (
            decoded(self._tokenizer, ids, shown=self._shown)
            for ids in (self._ids[self._start : self._read], self._ids[self._start :])
        )
        return text[len(known) :]

    def _take(self, text: str) -> None:
        self._start, self._read = self._read, len(self._ids)
        self._waiting += text
        if self._strip:
            self._waiting = self._waiting.lstrip()
            self._strip = not self._waiting
        ends = [at for stop in self._stop if (at := self._waiting.find(stop)) >= 0]
        if ends:
            self._waiting, self.stopped = self._waiting[: min(ends)], True
