"""Checks of messages: their role, content and tool calls."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from dschat_lora.config.files import parse_json

Message = dict[str, Any]
WEIGHT = "weight"  # key of an answer that is read, not learnt; its value is 0
# Columns, and keys of messages and parts, that hold what is not text.
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
IMAGES = MEDIA[:2]
# Types of parts that are text, as chat templates and OpenAI's interfaces call them.
_TEXT = (None, "text", "input_text", "output_text")


class EmptyTextError(ValueError):
    """A text that a row needs is there but empty."""


def check_message(name: str, message: object, media: Collection[str] = ()) -> None:
    """Refuse what is no message; ``name`` says which, such as the field and its number there.

    ``content`` is text or a list of text parts, and of parts of nothing but a type that is in
    ``media``. It may be absent beside ``tool_calls``, whose arguments :func:`call_arguments` must
    read. Keys other than these and ``role`` are for the chat template.

    Raises:
        ValueError: with what was found and what a message has.
    """
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    required = {"role"} if calls else {"role", "content"}
    if not isinstance(message, dict) or not required <= message.keys():
        keys = sorted(message) if isinstance(message, dict) else type(message).__name__
        raise ValueError(f"{name} must have 'role' and 'content', found {keys!s:.200}")
    if not isinstance(message["role"], str):
        raise ValueError(f"{name}: 'role' must be text, found {type(message['role']).__name__}")
    if not isinstance(calls, list | None) or not all(
        isinstance(call, dict) and isinstance(called_function(call).get("name"), str)
        for call in calls or ()
    ):
        form = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        raise ValueError(f"{name}: 'tool_calls' must be a list of {form}, found {calls!s:.200}")
    for call in calls or ():
        try:
            call_arguments(call)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if not (calls and message.get("content") is None):
        _check_content(name, message["content"], media)
        said = content_text(message["content"])
        if message["role"] == "assistant" and not (calls or said.strip()):
            raise EmptyTextError(f"{name}: the assistant's 'content' is empty")


def content_text(content: str | list[dict[str, Any]] | None, medium: str = "") -> str:
    """The text of checked content, its parts one after another, others as ``medium``."""
    if isinstance(content, list):
        return "".join(part.get("text", medium) for part in content)
    return content or ""


def is_medium(part: Mapping[str, Any]) -> bool:
    """Whether a part stands for an input beside text, as add-ons write it."""
    return part.keys() == {"type"} and part["type"] in MEDIA


def _check_content(name: str, content: object, media: Collection[str]) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"{name}: 'content' must be text, found {type(content).__name__}")
    for number, part in enumerate(content, start=1):
        where = f"{name}: part {number} of 'content'"
        kind, is_text = type(part).__name__, False
        if isinstance(part, dict):
            if is_medium(part) and part["type"] in media:
                continue
            typed = part.get("type")
            kind, is_text = repr(typed), isinstance(part.get("text"), str) and typed in _TEXT
            medium = medium_of(part) or next((m for m in MEDIA if m in str(typed)), None)
            if medium is not None:
                said = typed if medium in str(typed) else medium
                raise ValueError(f"{where} is {said!r:.200}; only text is supported")
        if not is_text:
            form = '{"type": "text", "text": ...}'
            raise ValueError(f"{where} must be {form}, found {kind:.200}")


def medium_of(values: Mapping[str, Any]) -> str | None:
    """The first of ``MEDIA`` that a row, a message or a part has something in."""
    return next((name for name in MEDIA if is_there(values.get(name))), None)


def is_there(value: object) -> bool:
    """Whether a value, as a table may have it for what a row lacks, holds anything."""
    if isinstance(value, dict | list):
        return any(map(is_there, value.values() if isinstance(value, dict) else value))
    return bool(value) and not (isinstance(value, float) and value != value)  # of pandas


def called_function(call: dict[str, Any]) -> dict[str, Any]:
    """Name and arguments of a tool call, which may stand in it or in its ``function``."""
    function = call.get("function")
    return function if isinstance(function, dict) else call


def call_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a tool call, which may hold them as an object or as its JSON; {} without any.

    Raises:
        ValueError: if they are malformed, or no object.
    """
    function = called_function(call)
    given, what = function.get("arguments"), f"the arguments of {function.get('name')!r:.200}"
    value = {} if given is None else given
    if isinstance(given, str):
        try:
            value = parse_json(given) if given.strip() else {}
        except ValueError as error:
            raise ValueError(f"{what} are not JSON: {error}; found {given!r:.200}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object or its JSON, found {given!r:.200}")
    return value


def tool_schemas(value: object) -> list[dict[str, Any]] | None:
    """Functions that messages may call, each in the form of OpenAI; None without any.

    ``value`` is a list or its JSON; a function is an object or its JSON, in ``function`` or bare.

    Raises:
        ValueError: if it is something else.
    """

    def read(given: object) -> object:
        with suppress(ValueError):  # text that is no JSON is refused as such
            return parse_json(given) if isinstance(given, str) else given
        return given

    given = read(value)
    tools = [read(each) for each in given] if isinstance(given, list) else given or []
    if not isinstance(tools, list) or not all(
        isinstance(each, dict) and all(isinstance(key, str) for key in each) for each in tools
    ):
        raise ValueError(f"`tools` must be a list of JSON schemas, found {value!s:.200}")
    made = []
    for each in tools:
        is_bare = "function" not in each and isinstance(each.get("name"), str)
        if is_bare and each.get("type") in (None, "function"):
            own = {key: value for key, value in each.items() if key != "type"}
            each = {"type": "function", "function": own}
        made.append(each)
    return made or None


def with_arguments(message: Message, write: Callable[[dict[str, Any]], Any] = dict) -> Message:
    """The message with what ``write`` makes of the arguments of each tool call.

    Raises:
        ValueError: see :func:`call_arguments`.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        made = {**called_function(call), "arguments": write(call_arguments(call))}
        calls.append({**call, "function": made} if called_function(call) is not call else made)
    return {**message, "tool_calls": calls}
