"""Row types: checks that a raw row is one of the five, and usable for a stage."""

from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from dschat_lora.config.groups import DataConfig
from dschat_lora.data.readers import RawRow, RowError, iter_file
from dschat_lora.data.sources import Source, find_source

RowType = Literal[
    "text", "prompt-completion", "conversation", "preference", "unpaired preference", "prompt"
]
# What a stage makes of rows: texts to learn, two answers to compare, answers that are good or bad,
# or prompts to answer.
DataKind = Literal["samples", "pairs", "unpaired", "prompts"]

KNOWN_TYPES = (
    "`text`; `prompt`, `completion`; `messages`; `chosen`, `rejected` with or without `prompt`; "
    "or `prompt`"
)
# Bytes of a file that start-up checks read whole, in less than a second.
SMALL_FILE = 16 * 2**20


class EmptyRowError(RowError):
    """A row whose text is there but empty."""


@dataclass(frozen=True)
class ParsedRow:
    """A row of known type whose fields have the right types and are not empty."""

    location: str
    kind: RowType
    values: dict[str, Any]  # without absent (null) columns


def check_sources(config: DataConfig, kind: DataKind = "samples") -> None:
    """Check that all data can be found and that a stage can use their rows.

    Reads small files whole, the first row of others, and nothing from the network.

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
        "unpaired preference": ("prompt", "completion"),
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
    """The type of a row by its columns, the richest that fits."""
    has = values.keys()
    if has & {"chosen", "rejected"}:
        if missing := {"chosen", "rejected"} - has:
            raise RowError(location, f"row lacks {sorted(missing)[0]!r}; it has {sorted(has)}")
        return "preference"
    if "messages" in has:
        return "conversation"
    if "prompt" in has and "completion" in has:
        return (
            "unpaired preference" if isinstance(values.get("label"), bool) else "prompt-completion"
        )
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
        lacks = "'chosen' and 'rejected'"
        reason = "this stage compares a better and a worse answer"
    elif kind == "unpaired" and row.kind not in ("preference", "unpaired preference"):
        lacks = "'label', or 'chosen' and 'rejected'"
        reason = "this loss needs answers that are said to be good or bad"
    elif kind == "prompts" and row.kind == "text":
        lacks, reason = "'prompt'", "this stage answers prompts"
    elif kind == "samples" and row.kind == "prompt":
        lacks = "'completion'"
        reason = "name the text to learn 'completion': a prompt alone has no answer"
    else:
        return row
    raise RowError(row.location, f"row lacks {lacks}; it has {sorted(row.values)}; {reason}")


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
