"""What a chat template leaves out of the messages that it is given."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dschat_lora.data.chat import Chat
from dschat_lora.data.messages import WEIGHT, Message, called_function, content_text
from dschat_lora.data.templates import PROBE
from dschat_lora.data.thoughts import KEYS

_MOST_SHAPES = 4096  # of conversations, that are remembered
Place = tuple[int, str]  # number of a message, and which part of it


def left_out(
    messages: Sequence[Message], chat: Chat, *, answers: Sequence[int] = (), asks: bool = False
) -> tuple[str, ...]:
    """Kinds of what a template does not write of messages and tools, where that is its choice.

    These are thoughts, tools, system messages and what is said beside a call. Templates are asked
    once for all conversations of a shape: the same roles, with calls, thoughts and text in the same
    places. Where ``answers`` are samples of their own, something is left out if it is in none of
    them. ``asks``: the messages are a prompt.

    Raises:
        ValueError: for a message or call that is left out, without which the others mean something
            else.
    """
    if chat.is_built_in and all(len(message) == 2 for message in messages):
        return ()  # it refuses what it does not write
    missing = _unwritten(messages, chat, asks)
    for index in answers[:-1] if missing else ():
        earlier = _unwritten(messages[: index + 1], chat, False)
        missing = {(at, part) for at, part in missing if at > index or (at, part) in earlier}
    kinds: dict[str, None] = {}
    for index, part in sorted(missing):
        message = messages[index] if index >= 0 else {}
        calls = message.get("tool_calls") or []
        if part in ("thoughts", "tools"):
            kinds[part] = None
        elif part == "content" and message["role"] in ("system", "developer"):
            kinds["system messages"] = None
        elif part == "content" and calls:
            kinds["text beside tool calls"] = None
        elif part == "content":
            raise ValueError(
                f"the chat template omits message {index + 1}, of role {message['role']!r}; use a "
                "role that the template supports, or another --chat_template"
            )
        else:
            name = called_function(calls[int(part)])["name"]
            raise ValueError(f"the chat template omits the call of {name!r} in message {index + 1}")
    return tuple(f"{kind}, by the chat template" for kind in kinds)


def _unwritten(messages: Sequence[Message], chat: Chat, asks: bool) -> set[Place]:
    """Parts of messages that are not in their rendering; tools are part of message -1."""
    shape = tuple(map(_shape, messages))
    key = (repr(chat.variables), bool(chat.tools), asks, shape)
    if key in chat.unwritten:
        return chat.unwritten[key]
    if len(chat.unwritten) >= _MOST_SHAPES:
        chat.unwritten.clear()
    places: list[Place] = []

    def stand_in(index: int, part: str) -> str:
        places.append((index, part))
        return f"{PROBE}{len(places) - 1}{PROBE}"

    marked = [_marked(index, message, stand_in) for index, message in enumerate(messages)]
    tools = chat.tools
    if tools and isinstance(tools[0].get("function"), dict):
        named = {**tools[0]["function"], "name": stand_in(-1, "tools")}
        tools = [{**tools[0], "function": named}]
    text = ""
    try:
        text = replace(chat, tools=tools).render(marked, add_generation_prompt=asks)
    except ValueError:
        places = []  # what stands in is no such value as the template wants
    lost = {place for n, place in enumerate(places) if f"{PROBE}{n}{PROBE}" not in text}
    chat.unwritten[key] = lost
    return lost


def _thought_in(message: Message) -> bool:
    """Whether an answer's content begins with a thought."""
    if message["role"] != "assistant":
        return False
    before, end, _ = content_text(message.get("content")).partition("</think>")
    return bool(end and before.replace("<think>", "").strip())


def _shape(message: Message) -> tuple[Any, ...]:
    """All by which a template could tell one message from another, but for what they say."""
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str) and "</think>" not in content:
        return message["role"], not content or content.isspace()
    return (
        message["role"],
        bool(content_text(content).strip()),
        _thought_in(message),
        len(message.get("tool_calls") or ()),
        *sorted(key for key, value in message.items() if value),
    )


def _marked(index: int, message: Message, stand_in: Callable[[int, str], str]) -> Message:
    """The message with short texts in place of its own."""
    made = {key: value for key, value in message.items() if key != WEIGHT}
    if content_text(message.get("content")).strip():
        made["content"] = stand_in(index, "content")
        if _thought_in(message):
            thought = stand_in(index, "thoughts")
            made["content"] = f"<think>\n{thought}\n</think>\n\n{made['content']}"
    thoughts = [key for key in KEYS if isinstance(made.get(key), str) and made[key].strip()]
    if message["role"] == "assistant" and thoughts:  # a template reads one of them
        made |= dict.fromkeys(thoughts, stand_in(index, "thoughts"))
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            _marked_call(call, stand_in(index, str(number))) for number, call in enumerate(calls)
        ]
    return made


def _marked_call(call: dict[str, Any], name: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], name)}
    return {**call, "name": name, "arguments": {"x": "1"}}
