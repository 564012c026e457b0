"""Data-to-text files of E2E, WebNLG and DART as rows of ``prompt`` and ``completion``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dschat_lora.data.row_formats import RowFormat, TwoWayTokenizer

# Of richer row types, or asked already: beside them lists of token ids are further columns.
_BEFORE_TOKENS = {"chosen", "rejected", "messages", "prompt"}


def is_e2e_line(value: object, path: Path | None) -> bool:
    """Whether ``value`` is a line that has a meaning before its text."""
    return isinstance(value, str) and "||" in value


def e2e_rows(line: str) -> list[dict[str, Any]]:
    """The row in a line ``meaning||text`` of E2E.

    Raises:
        ValueError: if it has no ``||``, or several.
    """
    meaning, bars, text = line.partition("||")
    if not bars:
        raise ValueError("line has no || between a meaning and its text")
    if "||" in text:
        raise ValueError("line has || more than once")
    return [_row(meaning.strip(), text.strip())]


def webnlg_rows(entry: object) -> list[dict[str, Any]]:
    """A row for each text of an entry that its annotators found good, with the category.

    An entry of WebNLG 2017 is an object of one numbered object.

    Raises:
        ValueError: naming what is absent or of another type.
    """
    (content,) = entry.values() if isinstance(entry, dict) and len(entry) == 1 else (None,)
    if not isinstance(content, dict) or "modifiedtripleset" not in content:
        raise ValueError("entry is no object of one object with 'modifiedtripleset'")
    triples = [
        tuple(_text(triple, part) for part in ("subject", "property", "object"))
        for triple in _items(content, "modifiedtripleset")
    ]
    meaning, category = _joined(triples), _text(content, "category")
    return [
        {**_row(meaning, _text(each, "lex")), "category": category}
        for each in _items(content, "lexicalisations")
        if _text(each, "comment") == "good"
    ]


def is_dart_set(value: object, path: Path | None) -> bool:
    """Whether ``value`` is a set of a JSON file of DART, and no row that took over its columns."""
    return (
        path is not None
        and isinstance(value, dict)
        and {"tripleset", "annotations"} <= value.keys()
        and "prompt" not in value
    )


def dart_rows(value: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each text of a set of triples, relations in lower case.

    Raises:
        ValueError: naming what is absent or of another type.
    """
    triples: list[tuple[str, ...]] = []
    for triple in _items(value, "tripleset"):
        texts = isinstance(triple, list) and all(isinstance(part, str) for part in triple)
        if not texts or len(triple) != 3:
            raise ValueError(f"'tripleset' has {triple!r} where three texts belong")
        subject, relation, target = triple
        triples.append((subject, relation.lower(), target))
    meaning = _joined(triples)
    return [_row(meaning, _text(each, "text")) for each in _items(value, "annotations")]


def is_token_row(value: Any, path: Path | None) -> bool:
    """Whether a row is one of microsoft/LoRA's ``gpt2_encode.py``: two lists of token ids."""
    if path is not None or not isinstance(value.get("completion"), list):
        return False
    return value.keys().isdisjoint(_BEFORE_TOKENS) and all(
        isinstance(ids, list) and ids and all(type(token) is int for token in ids)
        for ids in (value.get("context"), value["completion"])
    )


def token_rows(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row, whose context is a prompt."""
    rest = {name: value for name, value in values.items() if name != "context"}
    return [{**rest, "prompt": values["context"]}]


def token_texts(values: Mapping[str, Any], tokenizer: TwoWayTokenizer) -> dict[str, Any]:
    """The row with the texts that its token ids are of, without their end-of-sequence.

    Raises:
        ValueError: if ``tokenizer`` makes other ids of a text, as one of another model does.
    """
    texts = {}
    for name in ("prompt", "completion"):
        ids = [int(token) for token in values[name]]
        ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        try:
            text = tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        except OverflowError:  # of ids that no vocabulary has
            text = ""
        if not text.strip() or tokenizer.encode(text, add_special_tokens=False) != ids:
            column = "context" if name == "prompt" else name
            raise ValueError(
                f"`{column}` holds token ids that the model's tokenizer makes of no text; they "
                "are of another tokenizer"
            )
        texts[name] = text
    return {**values, **texts}


E2E = RowFormat(e2e_rows, is_e2e_line)
WEBNLG = RowFormat(webnlg_rows, list_key="entries")
DART = RowFormat(dart_rows, is_dart_set)
TOKEN_IDS = RowFormat(token_rows, is_token_row, texts=token_texts)


def _row(meaning: str, text: str) -> dict[str, Any]:
    return {"prompt": meaning, "completion": f" {text}"}


def _joined(triples: list[tuple[str, ...]]) -> str:
    return " | ".join(" : ".join(triple) for triple in triples)


def _items(value: dict[str, Any], name: str) -> list[Any]:
    items = value.get(name)
    if not isinstance(items, list):
        raise ValueError(f"{name!r} must be a list, found {type(items).__name__}")
    return items


def _text(value: object, name: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"an object with {name!r} belongs where {type(value).__name__} is")
    text = value.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{name!r} must be text, found {type(text).__name__}")
    return text
