"""Rows of sources as files of records, made by several processes."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dschat_lora.data.chat import Chat
from dschat_lora.data.readers import Line, RawRow, RowError, iter_unread
from dschat_lora.data.records import row_digest, text_digest, to_records
from dschat_lora.data.row_files import ROWS_PER_FILE, RowRecords, write_rows
from dschat_lora.data.rows import (
    DataKind,
    EmptyRowError,
    RowOptions,
    is_learnt,
    parse_row,
    require_usable,
)
from dschat_lora.data.sources import Source
from dschat_lora.data.store import is_whole
from dschat_lora.data.unpaired import answers_of_row

MAX_EXAMPLES = 100  # bad rows that are kept
BYTES_PER_FILE = 4 * 2**20  # of lines that a file of records is made of, about


@dataclass(frozen=True)
class RowTask:
    """Rows of a source that become a file; none if it was made before."""

    source: int  # its number
    option: str  # that names it
    path: Path
    rows: Sequence[RawRow | Line]
    size: int  # number of rows


@dataclass
class RowCounts:
    """Counts of rows as they are read."""

    by_type: Counter[str] = field(default_factory=Counter)  # of training sources
    bad: int = 0  # rows that cannot be used
    empty: int = 0  # of these, rows with an empty text
    examples: list[str] = field(default_factory=list)  # of bad rows, with file and line

    def add_bad(self, error: RowError) -> None:
        """Count a row that cannot be used."""
        self.bad += 1
        self.empty += isinstance(error, EmptyRowError)
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(str(error))

    def merge(self, other: "RowCounts") -> None:
        """Add other counts; the first ``MAX_EXAMPLES`` bad rows are kept."""
        self.by_type.update(other.by_type)
        self.bad += other.bad
        self.empty += other.empty
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]


def row_tasks(sources: Mapping[int, Source], directory: Path) -> Iterator[RowTask]:
    """The rows of all sources in order, for one file of ``directory`` at a time."""
    file = 0
    for number, source in sources.items():
        for rows in _groups(iter_unread(source)):
            path = directory / f"rows-{file:06}.arrow"
            unread = [] if is_whole(path) else rows
            yield RowTask(number, source.option, path, unread, len(rows))
            file += 1


def _groups(rows: Iterator[RawRow | Line]) -> Iterator[list[RawRow | Line]]:
    group: list[RawRow | Line] = []
    size = 0
    for row in rows:
        group.append(row)
        size += row.size
        if len(group) == ROWS_PER_FILE or size >= BYTES_PER_FILE:
            yield group
            group, size = [], 0
    if group:
        yield group


@dataclass(frozen=True)
class RowReader:
    """Writes the records of a task's rows; called in worker processes."""

    options: RowOptions
    chat: Chat
    kind: DataKind
    skips: bool  # rows that cannot be used, which stop it otherwise

    def __call__(self, task: RowTask) -> RowTask:
        """The task without its rows.

        Raises:
            RowError: for a row that cannot be used.
        """
        if task.rows:
            counts, rows, digests, groups = RowCounts(), [], [], []
            for unread in task.rows:
                records, group = self.records(unread.read(), counts)
                # Of rows that are not used nothing but the prompt is known.
                digests.append(row_digest(records, self.kind) if records else b"")
                if self.kind == "unpaired":
                    records = answers_of_row(records)
                rows.append(records)
                groups.append(group)
            if task.option == "eval_data_path":
                counts.by_type.clear()
            write_rows(task.path, rows, digests=digests, groups=groups, counts=vars(counts))
        return replace(task, rows=[])

    def records(self, raw: RawRow, counts: RowCounts) -> tuple[RowRecords, bytes]:
        """Records of a row, none if it is not used, and the digest of its prompt, if it has one.

        The prompt is that of the row whatever the stage makes of it, so that every stage holds out
        the same rows.
        """
        group = b""
        try:
            row = parse_row(raw, self.options)
            records = to_records(row, self.chat, self.kind)
            prompt = records[-1].prompt
            if prompt:
                group = text_digest(prompt)
            require_usable(row, self.kind, self.options)
            if not is_learnt(row, self.kind):
                counts.by_type[f"{row.described} with label false left out"] += 1
                return (), group
            if self.kind == "prompts":
                if not prompt:
                    raise EmptyRowError(row.location, "there is nothing before the answer")
                # What JSON has no form for, such as a date, becomes text.
                columns = json.dumps(raw.values, ensure_ascii=False, default=str)
                records = tuple(record._replace(columns=columns) for record in records)
            _require_unicode(row.location, records)
            counts.by_type[row.described] += 1
            return records, group
        except RowError as error:
            if not self.skips:
                raise
            counts.add_bad(error)
            return (), group


def _require_unicode(location: str, records: RowRecords) -> None:
    """Refuse half a surrogate pair, which JSON can hold and no tokenizer reads."""
    for record in records:
        texts = (*(span.text for span in record.spans), record.rejected or "", record.columns)
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise RowError(location, f"{half!a} is half a character (a lone surrogate)") from error
