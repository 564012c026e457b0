"""Raw rows of data files with their place, and which of the five types a row is.

Only the standard library is imported at the top: start-up checks read rows before anything
heavy is loaded. Parquet and hub data sets import their readers when used.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from dschat_lora.config.groups import DataConfig
from dschat_lora.data.nlg import dart_rows, e2e_row, is_dart_set, is_webnlg_entry, webnlg_rows
from dschat_lora.data.sources import Source, data_suffix, find_source

RowType = Literal["text", "prompt-completion", "conversation", "preference", "prompt"]
Messages = list[dict[str, Any]]
# What a stage makes of rows: texts to learn, two answers to compare, or prompts to answer.
DataKind = Literal["samples", "pairs", "prompts"]

KNOWN_TYPES = (
    "`text`; `prompt`, `completion`; `messages`; `chosen`, `rejected` with or without `prompt`; "
    "or `prompt`"
)
# csv refuses cells longer than this; its own default, 128 KiB, is less than a long document.
MAX_CSV_CELL = 2**30
# A list of rows, or of WebNLG's entries.
JSON_LIST = re.compile(r'\s*(\{\s*"entries"\s*:\s*)?\[')
# Bytes of a file that start-up checks read whole, in less than a second.
SMALL_FILE = 16 * 2**20


class RowError(ValueError):
    """A row that cannot be used: where it is and why."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(location, reason)
        self.location = location
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class EmptyRowError(RowError):
    """A row whose text is there but empty."""


@dataclass(frozen=True)
class RawRow:
    """One row as read, or the reason why it could not be read."""

    location: str  # "file:line"; for .parquet and hub data "name:row"; both count from 1
    values: dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class ParsedRow:
    """A row of known type whose fields have the right types and are not empty."""

    location: str
    kind: RowType
    values: dict[str, Any]  # without absent (null) columns


def check_sources(config: DataConfig, kind: DataKind = "samples") -> None:
    """Check that all data can be found and that their rows can be used.

    Reads small files whole, the first row of others, and nothing from the network.

    Args:
        config: the data options.
        kind: what the stage makes of rows.

    Raises:
        ValueError: naming the option and path, or the file and line.
    """
    for source in config_sources(config):
        wanted: DataKind = "samples" if source.option == "sft_only_data_path" else kind
        for file in source.files:
            seen = None if file.stat().st_size <= SMALL_FILE else 1
            rows = 0
            for raw in islice(iter_file(file), seen):
                rows += 1
                if config.bad_rows == "stop":
                    require_usable(parse_row(raw), wanted)
            if not rows:
                raise ValueError(f"--{source.option} {source.entry}: {file} has no rows")


def config_sources(config: DataConfig) -> tuple[Source, ...]:
    """Every source that the options name, training data first."""
    options = ("data_path", "sft_only_data_path", "eval_data_path")
    return tuple(
        find_source(option, entry) for option in options for entry in getattr(config, option)
    )


def iter_rows(source: Source) -> Iterator[RawRow]:
    """Rows of all files of a source, or of a hub data set, in order.

    Raises:
        ValueError: if a file or hub data set cannot be read at all.
    """
    if source.hub_name is not None:
        yield from _iter_hub(load_hub(source), source.hub_name)
    for file in source.files:
        yield from iter_file(file)


def iter_file(path: Path) -> Iterator[RawRow]:
    """Rows of one file. A line that cannot be read becomes a row with a ``problem``."""
    readers = {
        ".jsonl": _iter_jsonl,
        ".jsonl.gz": _iter_jsonl,
        ".json": _iter_json,
        ".txt": _iter_e2e,
        ".txt.gz": _iter_e2e,
        ".csv": _iter_csv,
        ".parquet": _iter_parquet,
    }
    try:
        yield from readers[data_suffix(path) or ""](path)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def parse_row(raw: RawRow) -> ParsedRow:
    """The type of a row, its fields checked.

    Raises:
        RowError: with the place and what is wrong.
    """
    if raw.problem is not None:
        raise RowError(raw.location, raw.problem)
    # Files with rows of several types have null in the columns of the other types.
    values = {name: value for name, value in raw.values.items() if value is not None}
    kind = classify(values, raw.location)
    fields = {
        "text": ("text",),
        "conversation": ("messages",),
        "prompt-completion": ("prompt", "completion"),
        "preference": ("prompt", "chosen", "rejected"),
        "prompt": ("prompt",),
    }
    present = [name for name in fields[kind] if name in values]
    for name in present:
        _check_field(raw.location, name, values[name], text_only=kind == "text")
    if len({isinstance(values[name], str) for name in present}) > 1:
        raise RowError(raw.location, f"{present} must be all texts or all message lists")
    return ParsedRow(raw.location, kind, values)


def classify(values: dict[str, Any], location: str) -> RowType:
    """Which of the five types a row is, the richest first, from the columns it has."""
    has = values.keys()
    if has & {"chosen", "rejected"}:
        if missing := {"chosen", "rejected"} - has:
            raise RowError(location, f"row lacks {sorted(missing)[0]!r}; it has {sorted(has)}")
        return "preference"
    if "messages" in has:
        return "conversation"
    if "prompt" in has and "completion" in has:
        return "prompt-completion"
    if "text" in has:
        return "text"
    if "prompt" in has:
        return "prompt"
    if "completion" in has:
        raise RowError(location, f"row lacks 'prompt'; it has {sorted(has)}")
    raise RowError(location, f"row has {sorted(has)}; a row has {KNOWN_TYPES}")


def require_usable(row: ParsedRow, kind: DataKind) -> ParsedRow:
    """The row itself if ``kind`` can be made of it; two answers are one to learn as well."""
    if kind == "pairs" and row.kind != "preference":
        raise RowError(
            row.location,
            f"row lacks 'chosen' and 'rejected'; it has {sorted(row.values)}; this stage compares "
            "a better and a worse answer",
        )
    if kind == "prompts":
        if row.kind == "text":
            raise RowError(
                row.location,
                f"row lacks 'prompt'; it has {sorted(row.values)}; this stage answers prompts",
            )
        return row
    if row.kind == "prompt":
        raise RowError(
            row.location,
            f"row lacks 'completion'; it has {sorted(row.values)}; name the text to learn "
            "'completion': a prompt alone has no answer",
        )
    return row


def load_hub(source: Source) -> Any:
    """The ``datasets.Dataset`` of a hub name; ``org/name`` means its split ``train``.

    Raises:
        ValueError: in one line, if it cannot be loaded.
    """
    from datasets import load_dataset

    name, _, split = source.entry.partition(":")
    try:
        return load_dataset(name, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--{source.option} {source.entry} is not a local path and could not be loaded "
            f"from the hub: {reason}"
        ) from error


def _check_field(location: str, name: str, value: object, *, text_only: bool) -> None:
    if isinstance(value, str) and name != "messages":
        if not value.strip():
            raise EmptyRowError(location, f"`{name}` is empty")
        return
    if not isinstance(value, list) or text_only:
        wanted = {"messages": "a message list", "text": "text"}
        raise RowError(
            location,
            f"`{name}` must be {wanted.get(name, 'text or a message list')}, "
            f"found {type(value).__name__}",
        )
    if not value:
        raise EmptyRowError(location, f"`{name}` is empty")
    for number, message in enumerate(value, start=1):
        _check_message(location, f"`{name}` item {number}", message)


def _check_message(location: str, name: str, message: object) -> None:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        found = sorted(message) if isinstance(message, dict) else type(message).__name__
        raise RowError(location, f"{name} must have 'role' and 'content', found {found}")
    for key in ("role", "content"):
        if not isinstance(message[key], str):
            kind = type(message[key]).__name__
            raise RowError(location, f"{name}: {key!r} must be text, found {kind}")
    if message["role"] == "assistant" and not message["content"].strip():
        raise EmptyRowError(location, f"{name}: the assistant's 'content' is empty")


def _open_binary(path: Path) -> BinaryIO:
    if path.name.lower().endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _iter_jsonl(path: Path) -> Iterator[RawRow]:
    return _iter_lines(path, lambda location, line: _object_row(location, json.loads(line)))


def _iter_e2e(path: Path) -> Iterator[RawRow]:
    return _iter_lines(path, lambda location, line: RawRow(location, e2e_row(line)))


def _iter_lines(path: Path, parse: Callable[[str, str], RawRow]) -> Iterator[RawRow]:
    # Decoded line by line, so that bytes that are not UTF-8 spoil, and name, one line only.
    with _open_binary(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_line(f"{path}:{number}", line, parse)


def _parse_line(location: str, line: bytes, parse: Callable[[str, str], RawRow]) -> RawRow:
    try:
        return parse(location, line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return RawRow(location, {}, f"not UTF-8 (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        return RawRow(location, {}, f"not valid JSON ({error.msg}, column {error.colno})")
    except RecursionError:
        return RawRow(location, {}, "nested too deeply")
    except ValueError as error:
        return RawRow(location, {}, str(error))


def _object_row(location: str, value: object) -> RawRow:
    if isinstance(value, dict):
        return RawRow(location, value)
    return RawRow(location, {}, f"row is not a JSON object but {type(value).__name__}")


def _iter_json(path: Path) -> Iterator[RawRow]:
    """Rows of a JSON list, or of objects one after another, each with the line it begins on."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start + 1})") from error
    try:
        yield from _iter_json_text(path, text)
    except json.JSONDecodeError as error:
        raise RowError(
            f"{path}:{error.lineno}", f"not valid JSON ({error.msg}, column {error.colno})"
        ) from error


def _iter_json_text(path: Path, text: str) -> Iterator[RawRow]:
    decode = json.JSONDecoder().raw_decode
    opening = JSON_LIST.match(text)
    in_list, entries = opening is not None, opening is not None and opening[1] is not None
    at = _skip_space(text, opening.end() if opening else 0)
    line, counted = 1, 0
    while at < len(text) and not (in_list and text[at] == "]"):
        line, counted = line + text.count("\n", counted, at), at
        value, at = decode(text, at)
        yield from _json_rows(f"{path}:{line}", value, webnlg=entries)
        at = _skip_space(text, at)
        if in_list and text.startswith(",", at):
            at = _skip_space(text, at + 1)
        elif in_list and not text.startswith("]", at):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
    if in_list and "".join(text[at:].split()) != ("]}" if entries else "]"):
        what = "WebNLG's file to end after its entries" if entries else "one list of objects"
        raise json.JSONDecodeError(f"Expecting {what}", text, at)


def _json_rows(location: str, value: object, *, webnlg: bool) -> Iterator[RawRow]:
    """The row that ``value`` is, or those of one entry of WebNLG or DART, all of one place."""
    try:
        if webnlg:
            if not is_webnlg_entry(value):
                raise ValueError("entry is no object of one object with 'modifiedtripleset'")
            yield from (RawRow(location, row) for row in webnlg_rows(cast(dict[str, Any], value)))
        elif is_dart_set(value):
            yield from (RawRow(location, row) for row in dart_rows(cast(dict[str, Any], value)))
        else:
            yield _object_row(location, value)
    except ValueError as error:
        yield RawRow(location, {}, str(error))


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _iter_csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(MAX_CSV_CELL)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines)
        try:
            header = next(reader, None)
            if header is None:
                return
            # A cell may span lines: a row is named after its first one.
            first_line = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield _csv_row(f"{path}:{first_line}", header, cells)
                first_line = reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise RowError(f"{path}:{reader.line_num + 1}", f"not valid CSV ({error})") from error


def _csv_row(location: str, header: list[str], cells: list[str]) -> RawRow:
    if len(cells) != len(header):
        return RawRow(location, {}, f"row has {len(cells)} cells, the header names {len(header)}")
    return RawRow(location, dict(zip(header, cells, strict=True)))


def _iter_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{path}:{number}", values)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _iter_hub(dataset: Any, name: str) -> Iterator[RawRow]:
    for number, values in enumerate(dataset, start=1):
        yield RawRow(f"{name}:{number}", values)
