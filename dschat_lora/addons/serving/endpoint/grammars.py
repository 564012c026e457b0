"""Grammars of answers that a request constrains: JSON by a schema, and tool calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.addons.serving.endpoint.errors import invalid

# Bytes of all schemas of a request: of those much larger some take a minute to compile.
MAX_SCHEMA_BYTES = 2**16
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Between the parts of a JSON text; without a bound a model may write white space for ever.
_SPACE = {"whitespace_pattern": r"( |\n {0,8})?"}


@dataclass(frozen=True)
class Grammar:
    """A grammar that an answer follows, in llguidance's form, and the field that asks for it."""

    text: str  # JSON: {"grammars": [...]}
    field: str


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a request, and whether the answer may, must or must not call one.

    Attributes:
        shown: JSON schemas for the chat template; empty where nothing may be called.
        required: the tools of which one must be called; empty where none must.
        parallel: whether an answer may hold several calls.
    """

    shown: tuple[dict[str, Any], ...] = ()
    required: tuple[dict[str, Any], ...] = ()
    parallel: bool = True


def tool_choice(tools: object, choice: object, *, parallel: bool) -> ToolChoice:
    """The checked fields ``tools`` and ``tool_choice``, None where they are absent.

    Raises:
        ApiError: naming the field that is wrong.
    """
    form = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
    checked: list[dict[str, Any]] = []
    for number, tool in enumerate(tools if isinstance(tools, list) else [], start=1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise invalid(f"tools: entry {number} must be {form}", "tools")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            words = "a name of up to 64 letters, digits, '_', '-' and '.'"
            raise invalid(f"tools: entry {number} must have {words}", "tools")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid(f"tools: parameters of {name} must be a JSON schema", "tools")
        checked.append(tool)
    names = [tool["function"]["name"] for tool in checked]
    if len({*names}) < len(names):
        raise invalid("tools: two of them have the same name", "tools")
    if choice in ("none", "auto", None):
        return ToolChoice(() if choice == "none" else tuple(checked), parallel=parallel)
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(name, str):
        form = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise invalid(f"tool_choice must be {form}", "tool_choice")
    required = [t for t in checked if choice == "required" or t["function"]["name"] == name]
    if not required:
        which = "tools" if choice == "required" else f"tool {name!r:.80}"
        raise invalid(f"tool_choice: there are no such {which} in tools", "tool_choice")
    # A named function is called once, as OpenAI does.
    return ToolChoice(tuple(checked), tuple(required), parallel and choice == "required")


def response_schema(response_format: object) -> dict[str, Any] | None:
    """The JSON schema that ``response_format`` asks for; None where it is text or absent.

    Raises:
        ApiError: if it is none of OpenAI's forms.
    """
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    assert isinstance(response_format, dict)
    outer = response_format.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        form = (
            '{"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        )
        raise invalid(f"response_format must be {form}", "response_format")
    return schema


def request_grammar(
    tools: ToolChoice, schema: dict[str, Any] | None, chat_template: object
) -> Grammar | None:
    """The grammar of a request's answers; None where they are free.

    Calls have the form of Hermes where the chat template has its tags, else each is a JSON object.
    With a schema, tools that may be called can still be called.

    Raises:
        ApiError: naming the field whose schemas are too large, or of two that exclude each other.
    """
    if not tools.required and schema is None:
        return None
    if tools.required and schema is not None:
        words = "tool_choice demands a call, which response_format excludes; drop one of them"
        raise invalid(words, "response_format")
    field = "tool_choice" if tools.required else "response_format"
    callable_tools = tools.required or tools.shown
    schemas = [_parameters(tool) for tool in callable_tools]
    tags = isinstance(chat_template, str) and "<tool_call>" in chat_template
    rules = _call_rules(callable_tools, parallel=tools.parallel, tags=tags)
    starts = ["calls"] if callable_tools else []
    if schema is not None:
        starts.append(f"@schema_{len(schemas)}")
        schemas.append(schema)
    if (size := sum(len(json.dumps(each)) for each in schemas)) > MAX_SCHEMA_BYTES:
        most = f"{MAX_SCHEMA_BYTES:,} are taken where answers must follow them"
        raise invalid(f"{field}: the schemas have {size:,} bytes, at most {most}", field)
    named = [
        {"name": f"schema_{number}", "json_schema": {**each, "x-guidance": _SPACE}}
        for number, each in enumerate(schemas)
    ]
    lark = "\n".join([f"start: {' | '.join(starts)}", *rules])
    grammars = [{"name": "answer", "lark_grammar": lark}, *named]
    return Grammar(json.dumps({"grammars": grammars}), field)


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call's arguments, an object; without one, as OpenAI, there are none."""
    none = {"properties": {}, "additionalProperties": False}
    return {**(tool["function"].get("parameters") or none), "type": "object"}


def _call_rules(tools: Sequence[dict[str, Any]], *, parallel: bool, tags: bool) -> list[str]:
    """Rules in llguidance's variant of Lark; arguments of tool i follow the grammar schema_i."""
    if not tools:
        return []
    rules = []
    for number, tool in enumerate(tools):
        head = '{"name": ' + json.dumps(tool["function"]["name"]) + ', "arguments": '
        rules.append(f'call_{number}: {json.dumps(head)} @schema_{number} "}}"')
    body = " | ".join(f"call_{number}" for number in range(len(tools)))
    if not tags:
        return [f"calls: {body}", *rules]
    more = r' ("\n" call)*' if parallel else ""
    call = rf'call: "<tool_call>\n" ({body}) "\n</tool_call>"'
    return [f"calls: call{more}", call, *rules]
