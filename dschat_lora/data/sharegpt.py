"""ShareGPT's conversations as messages."""

from typing import Any

from dschat_lora.config.files import parse_json
from dschat_lora.data.columns import Columns, EmptyTextError, Messages, message

# ShareGPT's names of the speakers, and the roles of chat templates.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}


def conversation_of(values: Columns, column: str) -> Messages:
    """The messages of a ShareGPT column."""
    items = values[column]
    if not isinstance(items, list):
        raise ValueError(f"`{column}` must be a message list, found {type(items).__name__}")
    if not items:
        raise EmptyTextError(f"`{column}` is empty")
    return [_sharegpt_message(f"`{column}` item {n}", item) for n, item in enumerate(items, 1)]


def _sharegpt_message(where: str, item: object) -> dict[str, Any]:
    keys = item.keys() if isinstance(item, dict) else set()
    if not isinstance(item, dict) or not ({"from", "value"} <= keys or {"role", "content"} <= keys):
        found = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise ValueError(f"{where} must have 'from' and 'value', found {found}")
    speaker = item.get("from") or item.get("role")
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise ValueError(f"{where}: {speaker!r} is no speaker; use one of {', '.join(ROLES)}")
    if item.get("from") is None:
        return {**item, "role": ROLES[speaker]}
    content = item.get("value")
    if not isinstance(content, str):
        raise ValueError(f"{where}: 'value' must be text, found {type(content).__name__}")
    if speaker == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _tool_calls(where, content)}
    if ROLES[speaker] == "assistant" and not content.strip():
        raise EmptyTextError(f"{where}: the answer is empty")
    return message(ROLES[speaker], content)


def _tool_calls(where: str, text: str) -> list[dict[str, Any]]:
    """The call, or list of calls, that is written as JSON."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        raise ValueError(f"{where}: a function call must be JSON with 'name' and 'arguments'")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls
    ]
