"""Row types: a raw row is one of the six, and a stage can use it; checks of data before a run."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from dschat_lora.config.data import (
    COLUMNS,
    DataConfig,
    DataKind,
    UnpairedRows,
    parse_columns,
    split_weight,
)
from dschat_lora.config.files import TOO_DEEP
from dschat_lora.data.layouts import rename, to_canonical
from dschat_lora.data.media import MediaReader
from dschat_lora.data.message_layouts import flag
from dschat_lora.data.messages import IMAGES, MEDIA, EmptyTextError, check_message, medium_of
from dschat_lora.data.readers import MOST_WORDS, RawRow, RowError, iter_file, iter_rows
from dschat_lora.data.row_formats import TwoWayTokenizer, row_formats
from dschat_lora.data.sources import DataSource, find_source
from dschat_lora.data.templates import ASSISTANT

RowType = Literal[
    "text", "prompt-completion", "conversation", "preference", "unpaired preference", "prompt"
]

KNOWN_TYPES = (
    "`text`; `prompt`, `completion`; `messages`; `chosen`, `rejected` with or without `prompt`; "
    "or `prompt`; or as published `conversations`; `instruction`, `output`; `question`, `answer`; "
    "name other columns by --columns, as in --columns prompt=COLUMN completion=COLUMN"
)
# Bytes of a file that start-up checks read whole, in less than a second.
SMALL_FILE = 16 * 2**20
CHECKED_ROWS = 1000  # of rows in memory, likewise
CHECKED_FILES = 8  # of a source with a tail
# Of each training source with a tail, for the audit and, without --eval_data_path, for the rows
# that are held out.
HEAD_ROWS = 1000
ValueT = TypeVar("ValueT")
FIELDS: Mapping[RowType, Sequence[str]] = {  # columns of each type
    "text": ("text",),
    "conversation": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "unpaired preference": ("prompt", "completion"),
    "preference": ("prompt", "chosen", "rejected"),
    "prompt": ("prompt",),
}


class EmptyRowError(RowError):
    """A row whose text is there but empty."""


class ParsedRow(NamedTuple):
    """A row of known type whose fields have the right types and are not empty."""

    location: str
    kind: RowType
    values: dict[str, Any]  # of the row type's columns and others, without absent (null) ones
    layout: str = ""  # the layout it was found in, "" for the row type's own columns
    empty: Collection[str] = ()  # its absent (null) columns

    @property
    def described(self) -> str:
        """Its type, and the layout it was found in."""
        return f"{self.kind} ({self.layout})" if self.layout else self.kind

    @property
    def is_encoded(self) -> bool:
        """Whether prompt and completion are no texts yet, but token ids, say."""
        return self.layout in row_formats() and row_formats()[self.layout].texts is not None

    def with_texts(self, tokenizer: TwoWayTokenizer) -> dict[str, Any]:
        """The values, with the texts that are encoded in them.

        Raises:
            ValueError: if they are of another tokenizer.
        """
        own = row_formats().get(self.layout)
        return own.texts(self.values, tokenizer) if own and own.texts else self.values


@dataclass(frozen=True)
class RowOptions:
    """Options of reading rows."""

    # the file's column by the one that it stands for
    columns: Mapping[str, str] = field(default_factory=dict)
    unpaired: UnpairedRows = "refuse"  # what is learnt of answers with a label
    media: MediaReader | None = None  # of what rows hold beside text; None: that is refused


DEFAULT_OPTIONS = RowOptions()


def row_options(config: DataConfig, media: MediaReader | None = None) -> RowOptions:
    """The options as typed, parsed."""
    return RowOptions(parse_columns(config.columns), config.unpaired_rows, media)


def check_sources(
    config: DataConfig, kind: DataKind = "samples", media: MediaReader | None = None
) -> None:
    """Check that all data can be found and that a stage can use their rows.

    Reads small files whole, the first row of others, the first of those in memory, and nothing
    from the network.

    Raises:
        ValueError: naming the option and path, or the file and line.
    """
    options = row_options(config, media)
    for source in config_sources(config):
        wanted: DataKind = "samples" if source.option == "sft_only_data_path" else kind
        for file in source.files[: None if source.tail is None else CHECKED_FILES]:
            seen = None if file.stat().st_size <= SMALL_FILE else 1
            rows = 0
            for raw in islice(iter_file(file), seen):
                rows += 1
                if config.bad_rows == "stop":
                    _check_row(raw, wanted, options)
            if not rows:
                raise ValueError(f"--{source.option} {source.entry}: {file} has no rows")
        if source.rows is not None and config.bad_rows == "stop":
            for raw in islice(iter_rows(source), CHECKED_ROWS):
                _check_row(raw, wanted, options)


def _check_row(raw: RawRow, kind: DataKind, options: RowOptions) -> None:
    try:
        require_usable(parse_row(raw, options), kind, options)
    except RowError as error:
        raise at_bad_row(error) from None


def at_bad_row(error: RowError) -> RowError:
    """The error where a row that cannot be used stops a run: it names what goes on without it."""
    remedy = "; --bad_rows skip leaves such rows out"
    most, reason = MOST_WORDS - len(remedy), error.reason
    reason = reason if len(reason) <= most else f"{reason[: most - 4]} ..."
    return type(error)(error.location, reason + remedy)


def check_some_prompt_fits(config: DataConfig, tokenizer: str, kind: DataKind = "samples") -> None:
    """Refuse data in which every prompt alone has more tokens than a row may take.

    Only what is certain is refused, and soon known: nothing where files are too large to be read at
    start-up, where ``tokenizer`` is no local directory with a ``tokenizer.json``, where a
    conversation has several questions, of which a chat template may leave some out, or where rows
    are cut to fit. The tokenizer is read only if the first prompt is long enough in bytes.

    Raises:
        ValueError: naming the option, its value and the shortest prompt.
    """
    limit, file = config.max_seq_len, Path(tokenizer) / "tokenizer.json"
    if config.overlong not in ("split", "drop") or not file.is_file():
        return
    lengths: list[int] = []
    for text in _prompts(config):
        if text is None or len(text.encode()) <= limit:
            return
        if not lengths:
            from tokenizers import Tokenizer  # a vocabulary takes up to half a second to read

            reader = Tokenizer.from_file(str(file))
            reader.no_padding()  # files may ask for both
            reader.no_truncation()
        lengths.append(len(reader.encode(text, add_special_tokens=False).ids))
        if lengths[-1] <= limit:
            return
    if lengths:
        option = "max_prompt_seq_len" if kind == "prompts" else "max_seq_len"
        cut = ", or use --overlong truncate" if kind == "prompts" else ""
        raise ValueError(
            f"--{option} {limit}: none of the {len(lengths):,} prompts of --data_path fits (the "
            f"shortest has {min(lengths):,} tokens); raise it{cut}"
        )


def _prompts(config: DataConfig) -> Iterator[str | None]:
    """Each row's prompt, a conversation's only question; None where it is not known as text."""
    options = row_options(config)
    sources = [each for each in config_sources(config) if each.option != "eval_data_path"]
    files = [file for source in sources for file in source.files]
    whole = all(source.files for source in sources)
    if not whole or sum(file.stat().st_size for file in files) > SMALL_FILE:
        yield None
    for file in files:
        for raw in iter_file(file):
            try:
                row = parse_row(raw, options)
            except RowError:
                continue  # one that is skipped, or refused by who reads it
            value = row.values.get("messages", row.values.get("prompt"))
            if isinstance(value, list) and all(isinstance(each, dict) for each in value):
                questions = [each.get("content") for each in value if each["role"] == "user"]
                value = questions[0] if len(questions) == 1 else None
            yield value if isinstance(value, str) else None


def config_sources(config: DataConfig, *, head: bool = True) -> tuple[DataSource, ...]:
    """Every source that the options name, training data first.

    With a tail training sources are their first rows, unless ``head`` is False.
    """
    count = len(config.data_path)

    def of_each(values: Sequence[ValueT], default: ValueT) -> Sequence[ValueT]:
        return values if len(values) > 1 else [*(values or (default,))] * count

    sources, tail = [], config.tail
    splits: Sequence[str | None] = of_each(config.data_split_name, None)
    for typed, split, most in zip(
        config.data_path, splits, of_each(config.max_source_rows, 0), strict=True
    ):
        entry, weight = split_weight(typed)
        source = find_source("data_path", entry, split)
        sources.append(replace(source, weight=weight, most=most or None, tail=tail))
    for entry in config.sft_only_data_path:
        sources.append(replace(find_source("sft_only_data_path", entry), tail=tail))
    if tail is not None and head:
        sources = [replace(s, most=min(s.most or HEAD_ROWS, HEAD_ROWS)) for s in sources]
    return (*sources, *(find_source("eval_data_path", entry) for entry in config.eval_data_path))


def parse_row(raw: RawRow, options: RowOptions = DEFAULT_OPTIONS) -> ParsedRow:
    """The type of a row, its fields checked.

    Raises:
        RowError: with the place and what is wrong.
    """
    if raw.problem is not None:
        raise RowError(raw.location, raw.problem)
    try:
        return _checked_row(raw, options)
    except EmptyTextError as error:
        raise EmptyRowError(raw.location, str(error)) from error
    except ValueError as error:
        raise RowError(raw.location, str(error)) from error
    except RecursionError:
        raise RowError(raw.location, TOO_DEEP) from None


def _checked_row(raw: RawRow, options: RowOptions) -> ParsedRow:
    read = () if options.media is None else IMAGES
    values = rename(raw.values, options.columns) if options.columns else raw.values
    _check_media(values, read)
    # Files with rows of several types have null in the columns of the other types.
    empty = [name for name, value in values.items() if value is None]
    values = {name: value for name, value in values.items() if value is not None}
    # A cell of a CSV file that is empty is text.
    if options.unpaired == "all" or values.get("label") == "":
        values.pop("label", None)
    values, layout = to_canonical(values)
    kind = classify(values, empty)
    if options.media is not None:
        present = [name for name in FIELDS[kind] if name in values]
        values = options.media.row(values, present, _folder(raw.location.rpartition(":")[0]))
    if layout and (row := ParsedRow(raw.location, kind, values, layout, empty)).is_encoded:
        return row
    present = [name for name in FIELDS[kind] if name in values]
    for name in present:
        _check_field(name, values[name], kind, read)
    if len({isinstance(values[name], str) for name in present}) > 1:
        raise ValueError(f"{present} must be all texts or all message lists")
    if "label" in values and (good := flag(values["label"])) is not None:
        values = {**values, "label": good}
    return ParsedRow(raw.location, kind, values, layout, empty)


def classify(values: Mapping[str, object], empty: Collection[str] = ()) -> RowType:
    """The type of a row by its columns, the richest that fits; ``empty`` ones are null."""
    has = values.keys()
    if has & {"chosen", "rejected"}:
        if missing := {"chosen", "rejected"} - has:
            raise _lacking(sorted(missing)[0], has, empty)
        return "preference"
    if "messages" in has:
        return "conversation"
    if "prompt" in has and "completion" in has:
        return "unpaired preference" if "label" in has else "prompt-completion"
    if "text" in has:
        return "text"
    if "prompt" in has:
        return "prompt"
    if "completion" in has:
        raise _lacking("prompt", has, empty)
    if names := [name for name in COLUMNS if name in empty]:
        raise _lacking(names[0], has, empty)
    raise ValueError(f"row has {sorted(has)}{_meant(COLUMNS, has)}; a row has {KNOWN_TYPES}")


def _lacking(name: str, has: Collection[str], empty: Collection[str]) -> ValueError:
    """The error about a column that a row lacks, or that is null there."""
    if name in empty:
        return EmptyTextError(f"`{name}` is empty")
    return ValueError(f"row lacks {name!r}; it has {sorted(has)}{_meant([name], has)}")


def _meant(names: Collection[str], has: Collection[str]) -> str:
    """The question whether a column of a row is one of ``names``, spelt otherwise."""
    others = {str(each).lower(): each for each in has if each not in COLUMNS}
    for name in (each for each in names if each not in MEDIA):
        for close in difflib.get_close_matches(name, others, 1, 0.75):
            return f" (did you mean --columns {name}={others[close]}?)"
    return ""


def split_preference(values: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected; without a prompt, it is what both answers begin with."""
    chosen, rejected = values["chosen"], values["rejected"]
    if "prompt" in values:
        return values["prompt"], chosen, rejected
    length = shared_length(chosen, rejected)
    if isinstance(chosen, list):  # the answers themselves may be the same
        length = min(length, len(chosen) - 1, len(rejected) - 1)
    elif (turn := chosen.rfind(ASSISTANT, 0, length)) >= 0:
        length = turn + len(ASSISTANT)
    else:  # up to a whole word; the white space belongs to the answer, as in the Assistant format
        length = max((i for i in range(length) if chosen[i].isspace()), default=0)
    if length == 0:
        raise ValueError("`chosen` and `rejected` have no common prefix; give their `prompt`")
    if not (chosen[length:] and rejected[length:]):
        raise ValueError("one of `chosen` and `rejected` is empty after the shared prompt")
    return chosen[:length], chosen[length:], rejected[length:]


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Number of leading items, or characters, that are equal."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def require_usable(
    row: ParsedRow, kind: DataKind, options: RowOptions = DEFAULT_OPTIONS
) -> ParsedRow:
    """The row itself if ``kind`` can be made of it; two answers are one to learn as well."""
    if kind == "pairs" and row.kind != "preference":
        names, lacks = ["chosen", "rejected"], "'chosen' and 'rejected'"
        reason = "this stage compares a better and a worse answer"
    elif kind == "unpaired" and row.kind not in ("preference", "unpaired preference"):
        names, lacks = ["label"], "'label', or 'chosen' and 'rejected'"
        reason = "this loss needs answers labelled good or bad"
    elif kind == "prompts" and row.kind == "text":
        names, lacks, reason = ["prompt"], "'prompt'", "this stage needs prompts"
    elif kind == "samples" and row.kind == "prompt":
        names, lacks = ["completion", "output", "answer"], "'completion'"
        reason = (
            "a prompt alone has no answer: name the text to train on 'completion' (--columns "
            "completion=COLUMN)"
        )
    else:
        names, lacks, reason = [], "", ""
    if empty := [name for name in names if name in row.empty]:
        raise EmptyRowError(row.location, str(_lacking(empty[0], (), row.empty)))
    if lacks:
        has = f"it has {sorted(row.values)}{_meant(names, row.values)}"
        raise RowError(row.location, f"row lacks {lacks}; {has}; {reason}")
    if kind not in ("samples", "unpaired") or row.kind != "unpaired preference":
        return row
    label = row.values["label"]
    if not isinstance(label, bool):
        raise RowError(
            row.location,
            f"`label` of an answer must be true or false, 1 or 0, found {label!r}; "
            "--unpaired_rows all ignores it",
        )
    if kind == "samples" and options.unpaired == "refuse":
        raise RowError(
            row.location,
            "row has a `label`, so its answer may be bad; --unpaired_rows good_only trains on "
            "those with label true, all on every answer",
        )
    return row


def is_learnt(row: ParsedRow, kind: DataKind) -> bool:
    """False for an answer that its label calls bad, where answers are learnt."""
    unpaired = row.kind == "unpaired preference" and kind == "samples"
    return not (unpaired and row.values["label"] is False)


@cache
def _folder(file: str) -> Path:
    """The folder of a file of rows; that of the process for rows from elsewhere."""
    return Path(file).parent if Path(file).is_file() else Path()


def _check_media(values: Mapping[str, Any], read: Sequence[str]) -> None:
    """Refuse a row that is about more than its text, and the columns that are ``read``."""
    if medium_of({name: values.get(name) for name in read}) is not None:
        values = {name: value for name, value in values.items() if name not in read}
    columns = [name for name in MEDIA if name in values]
    if columns and (medium := medium_of(values)) is not None:
        plural = medium.removesuffix("s") + "s"
        raise ValueError(f"`{medium}` is not empty; only text is trained on, without {plural}")
    for name in columns:
        sign = f"<{name.removesuffix('s')}>"
        if sign in str(values):
            reason = "" if name in read else "; only text is supported"
            raise ValueError(f"a text has {sign}, and `{name}` is empty{reason}")


def _check_field(name: str, value: object, kind: str, read: Sequence[str]) -> None:
    is_text = isinstance(value, str) and name != "messages"
    if not is_text and (not isinstance(value, list) or kind == "text"):
        wanted = {"messages": "a message list", "text": "text"}
        raise ValueError(
            f"`{name}` must be {wanted.get(name, 'text or a message list')}, "
            f"found {type(value).__name__}"
        )
    if not (value.strip() if isinstance(value, str) else value):
        raise EmptyTextError(f"`{name}` is empty")
    for number, message in enumerate(value if isinstance(value, list) else (), start=1):
        check_message(f"`{name}` item {number}", message, read[1:])  # a part is one
