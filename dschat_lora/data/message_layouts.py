"""Messages as data sets write them, in the one form that chat templates take."""

from collections.abc import Mapping, Sequence
from typing import Any

from dschat_lora.config.files import parse_json
from dschat_lora.data.messages import (
    WEIGHT,
    EmptyTextError,
    called_function,
    is_there,
    medium_of,
)

Messages = list[dict[str, Any]]

# ShareGPT's names of the speakers, and the roles of chat templates.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")
# Of messages with `role`, names that are no template's: OpenAI's older ones, and ms-swift's.
_OLDER = {name: ROLES[name] for name in (*_CALLS, "function", "function_response", "tool_response")}
# Keys by which OpenAI, LLaMA-Factory, ms-swift and axolotl say whether a message is learnt.
LEARNT_BY = (WEIGHT, "loss_weight", "loss_scale", "train", "training", "loss")
# What is learnt of a message in a form of their own.
_PARTLY = ("train_detail", "training_detail", "mask", "masked", "loss_mask")
_FLAGS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
_PLAIN = ("system", "user", "assistant")  # roles that are everybody's


def flag(value: object) -> bool | None:
    """What true or false, 1 or 0, or a text of these says; None for any other."""
    is_scalar = isinstance(value, bool | int | float | str)
    return _FLAGS.get(str(value).strip().lower()) if is_scalar else None


def message(role: str, content: str) -> dict[str, Any]:
    """A message of a conversation."""
    return {"role": role, "content": content}


def standard_messages(column: str, items: Sequence[Any]) -> list[Any]:
    """Messages of ``role`` and ``content``, as chat templates know them.

    Read are ShareGPT's ``from`` and ``value``, calls and results of tools in OpenAI's older format
    and in that of ms-swift, and LLaMA-Factory's parts. A call joins the answer before it. An answer
    that is not to be learnt has the key ``WEIGHT``. What is no message stays as it is.

    Raises:
        EmptyTextError: if an answer of ShareGPT is empty.
        ValueError: if an item is of such a format but wrong, or holds what is not text.
    """
    made: list[Any] = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict) or (
            len(item) == 2 and item.get("role") in _PLAIN and isinstance(item.get("content"), str)
        ):
            made.append(item)
            continue
        where = f"`{column}` item {number}"
        standard, before = _standard(where, item), made[-1] if made else None
        is_call = (item.get("from") or item.get("role")) in _CALLS
        if is_call and isinstance(before, dict) and before.get("role") == "assistant":
            if before.get(WEIGHT) != standard.get(WEIGHT):
                raise ValueError(
                    f"{where} is a call in the same turn as the item before it, and must have the "
                    "same weight"
                )
            calls = [*(before.get("tool_calls") or ()), *standard["tool_calls"]]
            standard = {**made.pop(), "tool_calls": calls}
        made.append(standard)
    return made


def _standard(where: str, item: dict[str, Any]) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if item.get("from") is not None and "value" in item:
        role, content = _of_sharegpt(where, item)
    if not isinstance(role, str):
        return item
    made = {k: v for k, v in item.items() if k not in ("from", "value", "function_call")}
    made["role"] = _OLDER.get(role, role)
    call = item["function_call"] if is_there(item.get("function_call")) else None
    if call is not None and made.get("tool_calls"):
        raise ValueError(f"{where} has 'function_call' and 'tool_calls'; give one of them")
    if call is not None or role in _CALLS:
        made["tool_calls"] = _calls(where, content if call is None else call)
        content = content if role not in _CALLS else None
    if isinstance(content, list):
        content, of_parts = _without_values(where, content)
        made |= of_parts
    if content is not None or "content" in item or "tool_calls" in made:
        made["content"] = content
    weight = _weight(where, made)
    made = {k: v for k, v in made.items() if k not in LEARNT_BY and k not in _PARTLY} | weight
    if medium := medium_of(made):
        raise ValueError(f"{where}: {medium!r} is not empty; only text is supported")
    return made


def conversation_of(values: Mapping[str, Any], column: str) -> Messages:
    """The messages of a column that holds ShareGPT's ``from`` and ``value``, or the like."""
    items = values[column]
    if not isinstance(items, list):
        raise ValueError(f"`{column}` must be a message list, found {type(items).__name__}")
    if not items:
        raise EmptyTextError(f"`{column}` is empty")
    named = []
    for number, item in enumerate(items, 1):
        where = f"`{column}` item {number}"
        keys = item.keys() if isinstance(item, dict) else set()
        has_content = keys & {"content", "tool_calls", "function_call"}
        if not ({"from", "value"} <= keys or ("role" in keys and has_content)):
            has = sorted(item) if isinstance(item, dict) else type(item).__name__
            raise ValueError(f"{where} must have 'from' and 'value', found {has}")
        if item.get("from") is None:
            role = _role(where, item.get("role"))
            item = item if item["role"] in _CALLS else {**item, "role": role}
        named.append(item)
    return standard_messages(column, named)


def unweighted(column: str, messages: Messages, *, is_answer: bool) -> Messages:
    """Messages of which one answer is compared, or good or bad: no other is learnt or left.

    Raises:
        ValueError: if the last one ``is_answer`` and not to be learnt.
    """
    if is_answer and messages and isinstance(messages[-1], dict) and WEIGHT in messages[-1]:
        raise ValueError(
            f"`{column}`: the compared answer has weight 0; remove the key, or the row"
        )
    return [
        {k: v for k, v in each.items() if k != WEIGHT} if isinstance(each, dict) else each
        for each in messages
    ]


def _role(where: str, speaker: object) -> str:
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(
            f"{where}: {speaker!r} is not a known speaker; use one of {', '.join(ROLES)}"
        )
    return ROLES[speaker]


def _of_sharegpt(where: str, item: dict[str, Any]) -> tuple[str, str]:
    """The role, or that of a call, and the content."""
    speaker, content = item["from"], item["value"]
    role = _role(where, speaker)
    if not isinstance(content, str):
        raise ValueError(f"{where}: 'value' must be text, found {type(content).__name__}")
    has_calls = speaker in _CALLS or item.get("tool_calls") or item.get("function_call")
    if role == "assistant" and not has_calls and not content.strip():
        raise EmptyTextError(f"{where}: the answer is empty")
    return speaker if speaker in _CALLS else role, content


def _calls(where: str, value: object) -> Messages:
    """Calls that an object states, a list of such, or the JSON of these."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            value = None
    calls = [
        called_function(call) if isinstance(call, dict) else {}
        for call in (value if isinstance(value, list) else [value])
    ]
    if not calls or not all(
        {"name", "arguments"} <= call.keys() and isinstance(call["name"], str) for call in calls
    ):
        raise ValueError(f"{where}: a function call must be JSON with 'name' and 'arguments'")
    written = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    return [{"type": "function", "function": call} for call in written]


def _without_values(where: str, parts: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Parts with a ``text``, of those that LLaMA-Factory gives a ``value``; and further keys.

    Parts of tool calls and thoughts become the keys of the message that hold them.
    """
    texts: list[Any] = []
    keys: dict[str, Any] = {}
    for number, part in enumerate(parts, 1):
        kind, value = (part.get("type"), part.get("value")) if isinstance(part, dict) else ("", "")
        if kind in ("tool_call", "tool_calls") and value is not None:
            keys["tool_calls"] = [*keys.get("tool_calls", ()), *_calls(where, value)]
        elif kind == "reasoning" and isinstance(value, str):
            keys["reasoning_content"] = keys.get("reasoning_content", "") + value
        elif kind == "tools":
            raise ValueError(
                f"{where}: part {number} of 'content' is 'tools'; give them as the row's `tools`"
            )
        elif kind == "text" and isinstance(value, str) and part.get("text") is None:
            texts.append({"type": "text", "text": value})
        else:
            texts.append(part)
    return (texts if texts or not keys else None), keys


def _weight(where: str, message: Mapping[str, Any]) -> dict[str, int]:
    """The key of an answer that is not to be learnt; empty for other messages.

    Raises:
        ValueError: for a weight between, for contradictions, and where what the assistant does not
            say is to be learnt.
    """
    said: dict[str, bool] = {}
    for key in (*LEARNT_BY, *_PARTLY):
        value = message.get(key)
        if value is None or value in ("", []) or value != value:  # a missing number of pandas
            continue
        if key in _PARTLY:
            raise ValueError(f"{where} has {key!r}, which is not supported; use 'weight', 0 or 1")
        learnt = flag(value)
        if learnt is None:
            raise ValueError(f"{where}: {key!r} must be 0 or 1, found {value!r}")
        said[key] = learnt
    if len(set(said.values())) > 1:
        raise ValueError(f"{where}: {' and '.join(map(repr, said))} contradict each other")
    role = message["role"]
    # OpenAI's `weight` is 1 unless it is given, and counts for answers alone.
    if role != "assistant" and any(learnt for key, learnt in said.items() if key != WEIGHT):
        raise ValueError(
            f"{where}: {', '.join(map(repr, said))} requests training on a message of role "
            f"{role!r}; only the assistant's messages are trained on"
        )
    return {WEIGHT: 0} if role == "assistant" and False in said.values() else {}
