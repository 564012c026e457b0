"""Probing of chat templates: the form of messages they take, and how they end answers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dschat_lora.config.files import parse_json
from dschat_lora.data.messages import Message, content_text

# A letter for private use: no template knows it, none trims it.
PROBE = "\ue0ff"
_QUESTION: Message = {"role": "user", "content": "?"}
_VALUES = {"x": PROBE}
Render = Callable[[list[Message]], str]


@dataclass(frozen=True)
class TemplateFacts:
    """The form of messages that a template takes, and the end that it gives an answer."""

    takes_text: bool = True
    takes_parts: bool = False
    takes_no_content: bool = True  # beside tool calls
    # Form of a call's arguments; None: as they are
    arguments: Literal["object", "text"] | None = None
    after_answer: str = ""  # what follows an answer that is the last message
    after_earlier: str = ""  # what follows one that is not
    after_call: str = ""  # what follows the last argument of a call that is the last message


def probe_template(render: Render) -> TemplateFacts:
    """What renderings of a letter tell; ``render`` raises ValueError where a template refuses."""

    def rendered(*messages: Message) -> str:
        try:
            return render(list(messages))
        except ValueError:
            return ""

    def asks(content: object) -> str:
        return rendered({"role": "user", "content": content})

    plain, by_part = asks(PROBE), asks([{"type": "text", "text": PROBE}])
    takes_text = PROBE in plain
    # Some write a list out as it is.
    takes_parts = PROBE in by_part and (not takes_text or by_part == plain)
    by_parts = takes_parts and not takes_text
    question, answer, silent = (
        {"role": role, "content": [{"type": "text", "text": text}] if by_parts else text}
        for role, text in (("user", "?"), ("assistant", PROBE), ("assistant", ""))
    )
    calls = {
        (form, has_content): rendered(question, _calling(values, silent if has_content else {}))
        for form, values in (("object", _VALUES), ("text", json.dumps(_VALUES, ensure_ascii=False)))
        for has_content in (False, True)
    }
    good = {key for key, text in calls.items() if PROBE in text and not _is_quoted(text)}
    forms = {form for form, _ in good}
    return TemplateFacts(
        takes_text,
        takes_parts,
        takes_no_content=any(not has_content for _, has_content in good),
        arguments=forms.pop() if len(forms) == 1 else None,  # type: ignore[arg-type]
        after_answer=_behind(rendered(question, answer)),
        after_earlier=_behind(rendered(question, answer, question)),
        after_call=_behind(next((calls[key] for key in sorted(good)), "")),
    )


def fit_messages(messages: Sequence[Message], facts: TemplateFacts) -> list[Message]:
    """Messages without empty keys, in the form that the template takes."""
    return [_fit_message(message, facts) for message in messages]


def _fit_message(message: Message, facts: TemplateFacts) -> Message:
    fitted = {k: v for k, v in message.items() if v is not None and v != []}
    if "tool_calls" in fitted:
        fitted["tool_calls"] = [_fit_call(call, facts) for call in fitted["tool_calls"]]
        if not facts.takes_no_content:
            fitted.setdefault("content", "")
    if "content" in fitted:
        fitted["content"] = _fit_content(fitted["content"], facts)
    return fitted


def _fit_content(content: str | list[dict[str, Any]], facts: TemplateFacts) -> Any:
    if isinstance(content, list):
        return content if facts.takes_parts else content_text(content)
    by_parts = facts.takes_parts and not facts.takes_text
    return [{"type": "text", "text": content}] if by_parts else content


def _fit_call(call: dict[str, Any], facts: TemplateFacts) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _fit_call(call["function"], facts)}
    arguments = call.get("arguments")
    if facts.arguments == "object" and isinstance(arguments, str):
        return {**call, "arguments": parse_json(arguments or "{}")}
    if facts.arguments == "text" and isinstance(arguments, dict):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return call


def _calling(values: object, message: Message) -> Message:
    call = {"type": "function", "function": {"name": "f", "arguments": values}}
    return {**message, "role": "assistant", "tool_calls": [call]}


def _is_quoted(text: str) -> bool:
    """Whether arguments were written as a text in quotes, their own ones escaped."""
    at = text.rindex(PROBE)
    return '\\"' in text[max(0, at - 2) : at + 3]


def _behind(text: str) -> str:
    return text.rpartition(PROBE)[2] if PROBE in text else ""
