"""Checks of messages: their role, content and tool calls."""

from collections.abc import Callable
from typing import Any

from dschat_lora.config.files import parse_json
from dschat_lora.data.readers import RowError

Message = dict[str, Any]
# Types of parts that are no text, as chat templates and OpenAI's interface call them.
_NO_TEXT = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")


class EmptyRowError(RowError):
    """A row whose text is there but empty."""


def check_message(location: str, name: str, message: object) -> None:
    """Refuse what is no message; ``name`` is the field and the number of the message in it.

    ``content`` is text or a list of text parts, and may be absent beside ``tool_calls``, whose
    arguments :func:`call_arguments` must read. Keys other than these and ``role`` are for the chat
    template.

    Raises:
        RowError: with what was found and what a message has.
    """
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    required = {"role"} if calls else {"role", "content"}
    if not isinstance(message, dict) or not required <= message.keys():
        found = sorted(message) if isinstance(message, dict) else type(message).__name__
        raise RowError(location, f"{name} must have 'role' and 'content', found {found}")
    if not isinstance(message["role"], str):
        kind = type(message["role"]).__name__
        raise RowError(location, f"{name}: 'role' must be text, found {kind}")
    is_list = calls is None or isinstance(calls, list)
    if not is_list or not all(
        isinstance(call, dict) and isinstance(called_function(call).get("name"), str)
        for call in calls or ()
    ):
        form = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
        raise RowError(
            location, f"{name}: 'tool_calls' must be a list of {form}, found {calls!s:.200}"
        )
    for call in calls or ():
        try:
            call_arguments(call)
        except ValueError as error:
            raise RowError(location, f"{name}: {error}") from error
    if not (calls and message.get("content") is None):
        _check_content(location, name, message["content"])
        said = content_text(message["content"])
        if message["role"] == "assistant" and not (calls or said.strip()):
            raise EmptyRowError(location, f"{name}: the assistant's 'content' is empty")


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message's checked content, its parts one after another."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _check_content(location: str, name: str, content: object) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        kind = type(content).__name__
        raise RowError(location, f"{name}: 'content' must be text, found {kind}")
    for number, part in enumerate(content, start=1):
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            where = f"{name}: part {number} of 'content'"
            if isinstance(part, dict) and part.get("type") in _NO_TEXT:
                raise RowError(location, f"{where} is {part['type']!r}; text alone is read")
            found = repr(part.get("type")) if isinstance(part, dict) else type(part).__name__
            form = '{"type": "text", "text": ...}'
            raise RowError(location, f"{where} must be {form}, found {found}")


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
            raise ValueError(f"{what} are no JSON: {error}; found {given!r:.200}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object or its JSON, found {given!r:.200}")
    return value


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
