"""Columns of a row: their names by ``--columns``, and their texts as messages."""

from collections.abc import Mapping
from typing import Any

Columns = dict[str, Any]
Messages = list[dict[str, Any]]

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


class EmptyTextError(ValueError):
    """A text that a layout needs is there but empty."""


def rename(values: Columns, names: Mapping[str, str]) -> Columns:
    """A row's columns as ``--columns`` names them: ``{"prompt": "question"}`` reads ``question``.

    A column that is read loses its own name. Left out are the row's own columns of a name that is
    given, and those of a richer row type than the one that ``names`` describe.

    Raises:
        ValueError: if the row lacks a column.
    """
    for name, column in names.items():
        if column not in values:
            raise ValueError(
                f"row lacks {column!r} of --columns {name}={column}; it has {sorted(values)}"
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


def message(role: str, content: str) -> dict[str, Any]:
    """A message of a conversation."""
    return {"role": role, "content": content}


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
