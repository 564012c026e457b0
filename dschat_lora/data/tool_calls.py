"""Tool calls in the text of an answer, in the forms that chat templates teach models."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A function that a model asks for."""

    name: str
    arguments: dict[str, Any]


def tool_schema(function: Callable[..., object]) -> dict[str, Any]:
    """The JSON schema of a function with type hints and a docstring in Google's style.

    Raises:
        ValueError: if they do not say what it takes.
    """
    from transformers.utils import get_json_schema  # heavy

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise ValueError(str(error)) from error
    return schema


# Hermes, Qwen 2.5 and 3, and many that are trained on them.
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
# Qwen3-Coder, within the tags of Hermes or alone.
_CODER = re.compile(r"<function=([\w.-]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
# Mistral: a list of calls, or since version 11 a name and its arguments each time.
_MISTRAL = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
# gpt-oss: the recipient stands before or within the channel.
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.([\w.-]+)"
    r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*<\|message\|>(.*?)(?:<\|call\|>|$)",
    re.DOTALL,
)
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|>|$)", re.DOTALL
)
_CHANNEL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>\w+\s*<\|message\|>|<\|end\|>")
# Llama 3 writes nothing but the call, some after this token.
_PYTHON_TAG = "<|python_tag|>"
_END = re.compile(r"(?:<\|[\w]+\|>|</s>)\s*$")


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text beside its tool calls, and the calls.

    ``text`` is that of a whole turn, special tokens included: some forms begin with one. The forms
    are those of Hermes and Qwen, Qwen3-Coder, Mistral, gpt-oss and Llama 3. What begins like a
    call and is none stays text.
    """
    if _MISTRAL in text:
        before, _, rest = text.partition(_MISTRAL)
        calls = list(_of_mistral(rest.replace(_MISTRAL, " ")))
        return (before.strip(), calls) if calls else (text, [])
    for pattern, read in ((_HARMONY, _of_harmony), (_HERMES, _of_hermes), (_CODER, _of_coder)):
        read_calls = [(match, read(*match.groups())) for match in pattern.finditer(text)]
        calls = [call for _, call in read_calls if call is not None]
        if calls:
            for match, call in reversed(read_calls):
                if call is not None:
                    text = text[: match.start()] + text[match.end() :]
            return text.strip(), calls
    bare = text.strip().removeprefix(_PYTHON_TAG).strip()
    while (end := _END.search(bare)) is not None:
        bare = bare[: end.start()].rstrip()
    call = _called(_json(bare))
    return ("", [call]) if call is not None else (text, [])


def parse_answer(text: str, *, in_thought: bool = False) -> dict[str, Any]:
    """The message that the text of an answer is, with the fields of TRL's ``parse_response``.

    ``content`` is what stands beside thought and calls; ``reasoning_content`` (of gpt-oss
    ``thinking``) and ``tool_calls`` are there where the text has them, the arguments as objects.
    ``in_thought`` says that the prompt ends with ``<think>``; a call within a thought is none.
    """
    message: dict[str, Any] = {"role": "assistant"}
    stripped = text.lstrip()
    if in_thought or stripped.startswith("<think>"):
        thought = stripped if in_thought else stripped.removeprefix("<think>")
        thought, _, text = thought.partition("</think>")
        message |= {"reasoning_content": thought.strip()} if thought.strip() else {}
    elif thoughts := _ANALYSIS.findall(text):
        message["thinking"], text = "\n".join(thoughts), _ANALYSIS.sub("", text)
    beside, calls = parse_tool_calls(text)
    message["content"] = _CHANNEL.sub("", beside).strip()
    if calls:
        message["tool_calls"] = [{"type": "function", "function": c._asdict()} for c in calls]
    return message


def _called(value: object) -> ToolCall | None:
    """The call that an object states, under the names of OpenAI, Hermes or Llama."""
    if not isinstance(value, dict):
        return None
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def _json(text: str, otherwise: object = None) -> object:
    """The value that a text is the JSON of, or else another one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _leading_json(text: str, start: int = 0) -> tuple[object, int]:
    """The value that begins at a place of a text, and its end; None and the place without one."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _of_harmony(name: str, body: str) -> ToolCall | None:
    return _called({"name": name, "arguments": _json(body)})


def _of_hermes(body: str) -> ToolCall | None:
    if coder := _CODER.match(body):
        return _of_coder(*coder.groups())
    value, _ = _leading_json(body)
    return _called({"parameters": {}, **value} if isinstance(value, dict) else None)


def _of_coder(name: str, body: str) -> ToolCall | None:
    """Values are JSON where they can be read as such, else text."""
    return ToolCall(name, {key: _json(text, text) for key, text in _PARAMETER.findall(body)})


def _of_mistral(text: str) -> Iterator[ToolCall]:
    text, start = text.strip(), 0
    listed, _ = _leading_json(text)
    if isinstance(listed, list):
        yield from (call for call in map(_called, listed) if call is not None)
        return
    while named := _NAMED.match(text, start):
        arguments, start = _leading_json(text, named.end())
        if not isinstance(arguments, dict):
            return
        yield ToolCall(named[1], arguments)
