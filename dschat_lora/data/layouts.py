"""Columns of rows: names by ``--columns``, and layouts of published data sets, such as Alpaca."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dschat_lora.config.files import parse_json
from dschat_lora.data.message_layouts import (
    Messages,
    conversation_of,
    flag,
    message,
    standard_messages,
    unweighted,
)
from dschat_lora.data.messages import EmptyTextError
from dschat_lora.data.row_formats import format_of, row_formats, row_of
from dschat_lora.data.templates import HUMAN

Columns = dict[str, Any]

# Columns that hold what is learnt, those of the richest row type first.
LEARNT = (
    {"chosen", "rejected"},
    {"messages", "conversations"},
    {"completion"},
    {"output"},
    {"answer"},
    {"text"},
)
ASKED = {"prompt", "instruction", "question"}
# Of these, what is learnt by one name is asked by one name.
ASKED_BY = {"conversations": "", "output": "instruction", "answer": "question"}
OF_LAYOUTS = frozenset(
    (
        *("chosen", "rejected", "chosen_messages", "rejected_messages", "messages"),
        *("conversations", "instruction", "question", "message_id"),
    )
)
# Columns of messages, to which tools belong.
_OF_MESSAGES = ("messages", "conversations", "prompt", "chosen", "chosen_messages")
# What a question is about: without it, its answer would be another task's.
BESIDE_A_QUESTION = {"context", "choices", "options"}


def rename(values: Columns, names: Mapping[str, str]) -> Columns:
    """A row's columns as ``--columns`` names them: ``{"prompt": "question"}`` reads ``question``.

    A column that is read loses its own name. Left out are the row's own columns of a name that is
    given, and those of a richer row type than the one that ``names`` describe.

    Raises:
        ValueError: if the row lacks a column.
    """
    for name, column in names.items():
        if column not in values:
            close = difflib.get_close_matches(column, values, 1)
            meant = f"; did you mean {name}={close[0]}?" if close else ""
            raise ValueError(
                f"row lacks {column!r} of --columns {name}={column}; it has {sorted(values)}{meant}"
            )
    hidden = {*names, *names.values()}
    if names.keys() & ASKED:
        hidden |= ASKED | LEARNT[1]
    for name in names.keys() & ASKED_BY.keys():
        hidden |= ASKED - {ASKED_BY[name]}
    named = [place for place, columns in enumerate(LEARNT) if names.keys() & columns]
    hidden.update(*LEARNT[: named[0] if named else 0])
    own = {name: value for name, value in values.items() if name not in hidden}
    return own | {name: values[column] for name, column in names.items()}


def text_of(values: Columns, column: str, *, required: bool = True) -> str:
    """A column's text, "" where the row lacks it.

    Raises:
        EmptyTextError: if it is required and there is none.
        ValueError: if it is something else.
    """
    value = values.get(column, "")
    if not isinstance(value, str):
        raise ValueError(f"`{column}` must be text, found {type(value).__name__}")
    if required and not value.strip():
        raise EmptyTextError(f"`{column}` is empty")
    return value


def to_canonical(values: Columns) -> tuple[Columns, str]:
    """A row with the columns of the row types, and the layout it was found in ("": theirs).

    Args:
        values: the row's columns without absent (null) ones.

    Raises:
        EmptyTextError: if a text that the layout needs is empty.
        ValueError: if the row is of a layout but for something else.
    """
    texts = (values.get("prompt", ""), values.get("completion", ""))
    is_known = texts[0] or texts[1] or "text" in values
    is_plain = is_known and OF_LAYOUTS.isdisjoint(values)
    if is_plain and isinstance(texts[0], str) and isinstance(texts[1], str):
        return values, ""  # as most rows are, so that they cost little
    if (name := format_of(values)) is not None:
        values = row_of(name, values)
        return (values if row_formats()[name].texts else _published(values)[0]), name
    return _published(values)


def _published(values: Columns) -> tuple[Columns, str]:
    values = _with_functions(values)
    named = {"chosen_messages": "chosen", "rejected_messages": "rejected"}
    is_factory = named.keys() <= values.keys() and values.keys().isdisjoint(named.values())
    if is_factory:
        values = {named.get(name, name): value for name, value in values.items()}
    if answers := values.keys() & {"chosen", "rejected"}:
        values, layout = _preference(values) if len(answers) == 2 else (values, "")
        return values, "llama-factory" if is_factory else layout
    values, layout = _conversational(values)
    has_label = "label" in values and flag(values["label"]) is not None
    return (_unpaired(values) if has_label else values), layout


def _conversational(values: Columns) -> tuple[Columns, str]:
    if "messages" in values:
        values, layout = _message_lists(values, ("messages",))
        if layout:
            values = _with_tools({**values, "messages": _headed(values, values["messages"])})
        return values, layout
    values, layout = _message_lists(values, ("prompt", "completion"))
    if {"prompt", "completion"} <= values.keys():
        return _in_one_form(values, ["completion"]), layout
    if "prompt" in values:
        return values, layout
    # Beside a `text` these are more, unless they are something else of that name.
    alone, turns = "text" not in values, values.get("conversations")
    if "conversations" in values and (alone or (turns and isinstance(turns, list))):
        return _with_tools({**values, "messages": _conversation_prompt(values)}), "sharegpt"
    is_alpaca = {"instruction", "output"} <= values.keys()
    if is_alpaca and (alone or isinstance(values["instruction"], str)):
        return _answered(values, _alpaca_prompt(values), "output"), "alpaca"
    if {"message_id", "message_tree_id"} <= values.keys():
        raise ValueError(
            "row is one message of a tree, as in OASST; convert its threads to rows with `messages`"
        )
    others = {"text", *BESIDE_A_QUESTION}
    if {"question", "answer"} <= values.keys() and not values.keys() & others:
        return _answered(values, _question_prompt(values), "answer"), "question-answer"
    return values, ""


def _unpaired(values: Columns) -> Columns:
    """A row with a label, its conversation as the prompt and the last answer, which it is about."""
    messages = values.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return _compared(values, ["completion"])
    answers = [at for at, each in enumerate(messages) if each.get("role") == "assistant"]
    if not answers or answers[-1] == 0:
        return values
    rest = {name: value for name, value in values.items() if name != "messages"}
    own = {"prompt": messages[: answers[-1]], "completion": [messages[answers[-1]]]}
    return _compared({**rest, **own}, ["completion"])


def _with_functions(values: Columns) -> Columns:
    """The row with the ``functions`` of OpenAI's older format, if it has any, as its ``tools``."""
    functions = values.get("functions")
    if not functions or not any(isinstance(values.get(name), list) for name in _OF_MESSAGES):
        return values
    if isinstance(functions, str):
        functions = _parsed("functions", functions)
    if not isinstance(functions, list) or not all(
        isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions
    ):
        raise ValueError("`functions` must be a list of objects with 'name' and 'parameters'")
    if values.get("tools"):
        raise ValueError("row has both `functions` and `tools`; give one of them")
    rest = {name: value for name, value in values.items() if name != "functions"}
    return rest | {"tools": [{"type": "function", "function": each} for each in functions]}


def _preference(values: Columns) -> tuple[Columns, str]:
    """Chosen and rejected after a prompt of the same form, or holding it."""
    names = ("chosen", "rejected")
    values, layout = _message_lists(values, ("prompt", *names))
    values = _compared(values, names)
    begins = all(_begins_with_answer(values[name]) for name in names)
    for column, (read, name) in PROMPTS.items():
        if begins and "prompt" not in values and column in values:
            values, layout = {**values, "prompt": read(values)}, name
    if not isinstance(values.get("prompt"), str | list):
        return values, layout
    if all(isinstance(values[name], list) for name in names) and not begins:
        return _without_held_prompt(values, names), layout or "ultrafeedback"
    return _in_one_form(values, names), layout


def _compared(values: Columns, names: Sequence[str]) -> Columns:
    """The row, of whose message lists those of these names end in an answer that is compared."""
    return values | {
        name: unweighted(name, values[name], is_answer=name in names)
        for name in ("prompt", *names)
        if isinstance(values.get(name), list)
    }


def _without_held_prompt(values: Columns, names: Sequence[str]) -> Columns:
    """The row without a prompt that its message lists hold themselves."""
    prompt = values["prompt"]
    for name in names:
        if isinstance(prompt, list):
            held = values[name][: len(prompt)] == prompt
        else:
            contents = [each.get("content") for each in values[name] if isinstance(each, dict)]
            held = any(isinstance(c, str) and c.strip() == prompt.strip() for c in contents)
        if not held and isinstance(prompt, list):
            return values  # refused where the answers are counted
        if not held:
            raise ValueError(f"`{name}` must be the answer to `prompt`, or begin with `prompt`")
    return {name: value for name, value in values.items() if name != "prompt"}


def _in_one_form(values: Columns, names: Sequence[str]) -> Columns:
    """A text beside message lists as a message: the user's prompt, or the assistant's answers."""
    prompt, answers = values["prompt"], [values[name] for name in names]
    if isinstance(prompt, str) and all(isinstance(answer, list) for answer in answers):
        for name in names:
            if not _begins_with_answer(values[name]):
                raise ValueError(f"`{name}` must begin with the assistant if `prompt` is text")
        return {**values, "prompt": [message("user", text_of(values, "prompt"))]}
    if isinstance(prompt, list) and all(isinstance(answer, str) for answer in answers):
        own = {name: [message("assistant", text_of(values, name))] for name in names}
        return {**values, **own}
    return values


def _begins_with_answer(value: object) -> bool:
    """Whether no prompt precedes the answer; true of what is no answer, which is refused later."""
    if isinstance(value, str):
        return not value.startswith(HUMAN)  # as answers of Anthropic's HH, which hold their prompt
    first = value[0] if isinstance(value, list) and value else None
    return not isinstance(first, dict) or first.get("role", "assistant") == "assistant"


def _message_lists(values: Columns, names: Sequence[str]) -> tuple[Columns, str]:
    """The row with messages of any form in these columns as standard ones, a single one as a list.

    Told is the layout of ShareGPT.
    """
    layout = ""
    for name in names:
        value = values.get(name)
        if isinstance(value, dict) and name in ("chosen", "rejected"):
            value = [value]
        if not isinstance(value, list):
            continue
        if value and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys():
            layout = "sharegpt"
            value = conversation_of({name: value}, name)
        else:
            value = standard_messages(name, value)
        values = {**values, name: value}
    return values, layout


def _with_tools(values: Columns) -> Columns:
    """The row with a text in ``tools`` read as the JSON that it is."""
    tools = values.get("tools")
    return {**values, "tools": _parsed("tools", tools)} if isinstance(tools, str) else values


def _parsed(column: str, text: str) -> object:
    try:
        return parse_json(text or "[]")
    except ValueError as error:
        raise ValueError(
            f"`{column}` is not valid JSON ({getattr(error, 'msg', error)})"
        ) from error


def _headed(values: Columns, messages: Messages) -> Messages:
    """Messages after the text of a ``system`` column, unless they begin with one of their own."""
    return messages if messages[0].get("role") == "system" else [*_system(values), *messages]


def _alpaca_prompt(values: Columns) -> Messages:
    """System, earlier turns of ``history``, and instruction and input on lines of their own."""
    parts = [text_of(values, name, required=False) for name in ("instruction", "input")]
    text = "\n".join(part for part in parts if part.strip())
    if not text:
        raise EmptyTextError("`instruction` is empty")
    history, earlier = values.get("history") or [], []
    for turn in history if isinstance(history, list) else [history]:
        is_turn = isinstance(turn, list) and len(turn) == 2
        if not is_turn or not all(isinstance(text, str) for text in turn):
            raise ValueError(
                "`history` must be a list of pairs of texts, a question and its answer"
            )
        earlier += [message("user", turn[0]), message("assistant", turn[1])]
    return [*_system(values), *earlier, message("user", text)]


def _question_prompt(values: Columns) -> Messages:
    return [*_system(values), message("user", text_of(values, "question"))]


def _conversation_prompt(values: Columns) -> Messages:
    return _headed(values, conversation_of(values, "conversations"))


# Columns that a preference's prompt may be in, and the layout that it shows.
PROMPTS: Mapping[str, tuple[Callable[[Columns], Messages], str]] = {
    "conversations": (_conversation_prompt, "sharegpt"),
    "instruction": (_alpaca_prompt, "alpaca"),
    "question": (_question_prompt, "question-answer"),
}


def _answered(values: Columns, prompt: Messages, column: str) -> Columns:
    return {**values, "messages": [*prompt, message("assistant", text_of(values, column))]}


def _system(values: Columns) -> Messages:
    text = text_of(values, "system", required=False)
    return [message("system", text)] if text.strip() else []
