"""Meanings to put into words, and the lines that their texts are written in."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_lora.data.nlg import TOKEN_IDS, TwoWayTokenizer, token_texts
from dschat_lora.data.readers import RowError, iter_rows
from dschat_lora.data.rows import ParsedRow, RowOptions, parse_row, require_usable
from dschat_lora.data.sources import find_source


@dataclass
class Meaning:
    """A meaning to put into words, with its reference texts."""

    text: str
    references: list[str] = field(default_factory=list)
    category: str | None = None
    row: int = field(default=0, compare=False)  # the first of its rows, from 0


def read_meanings(paths: Sequence[str], tokenizer: TwoWayTokenizer | None = None) -> list[Meaning]:
    """Every distinct meaning in the order of its first row, with the texts of all its rows.

    Rows of token ids need the ``tokenizer``.

    Raises:
        ValueError: if a row cannot be used.
    """
    meanings: dict[str, Meaning] = {}
    rows = (raw for entry in paths for raw in iter_rows(find_source("data_path", entry)))
    for number, raw in enumerate(rows):
        row = require_usable(parse_row(raw, RowOptions(unpaired="all")), "prompts")
        values = _texts_of(row, tokenizer)
        prompt = values.get("prompt")
        if row.kind not in ("prompt", "prompt-completion") or not isinstance(prompt, str):
            raise RowError(row.location, "decode takes a `prompt` of text, its `completion`")
        meaning = meanings.setdefault(prompt, Meaning(prompt, row=number))
        if row.kind == "prompt-completion":
            meaning.references.append(values["completion"].strip())
        meaning.category = meaning.category or values.get("category")
    return list(meanings.values())


def _texts_of(row: ParsedRow, tokenizer: TwoWayTokenizer | None) -> dict[str, Any]:
    if row.layout != TOKEN_IDS or tokenizer is None:
        return row.values
    try:
        return token_texts(row.values, tokenizer)
    except ValueError as error:
        raise RowError(row.location, str(error)) from error


def prediction_lines(
    meanings: Sequence[Meaning], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> Iterator[str]:
    """A line of JSON for each meaning, with what was written: as text, and as token ids.

    ``id`` and ``predict`` are what microsoft/LoRA's ``gpt2_decode.py`` reads: the number of a row
    with this meaning, from 0, and the tokens.
    """
    for meaning, text, tokens in zip(meanings, texts, ids, strict=True):
        line: dict[str, Any] = {
            "meaning": meaning.text,
            "prediction": text,
            "references": meaning.references,
        }
        if meaning.category is not None:
            line["category"] = meaning.category
        line |= {"id": meaning.row, "predict": list(tokens)}
        yield json.dumps(line, ensure_ascii=False) + "\n"


def clean_text(text: str) -> str:
    """The text up to an empty line, stripped."""
    return text.split("\n\n")[0].strip()
