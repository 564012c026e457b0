"""Rows of sources as files of records, written by several processes and memory-mapped."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.messages import EmptyRowError
from dschat_lora.data.readers import Line, RawRow, RowError, iter_unread
from dschat_lora.data.records import TextRecord, answers_of, row_digest, text_digest, to_records
from dschat_lora.data.rows import DataKind, RowOptions, is_learnt, parse_row, require_usable
from dschat_lora.data.samples import TEXT, Column, is_whole, read_table, write_table
from dschat_lora.data.sources import Source

MAX_EXAMPLES = 100  # bad rows that are kept
ROWS_PER_FILE = 1000
BYTES_PER_FILE = 4 * 2**20  # of lines that a file of records is made of, about

# The records that one row becomes: one, or one for each answer of a conversation.
RowRecords = tuple[TextRecord, ...]


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
        """The task without its rows, whose file appears whole.

        Raises:
            RowError: for a row that cannot be used.
        """
        if not task.rows:
            return task
        counts, rows, digests, groups = RowCounts(), [], [], []
        for unread in task.rows:
            records, group = self.records(unread.read(), counts)
            # Of rows that are not used nothing but the prompt is known.
            digests.append(row_digest(records, self.kind) if records else b"")
            groups.append(group)
            rows.append(answers_of(*records) if self.kind == "unpaired" else records)
        if task.option == "eval_data_path":
            counts.by_type.clear()
        prompts = [record.prompt for row in rows for record in row]
        notes = {
            "digests": np.array(digests, "S16").tobytes(),
            "sizes": np.array([len(row) for row in rows], np.int64).tobytes(),
            "prompts": np.array([text_digest(p) if p else b"" for p in prompts], "S16").tobytes(),
            "groups": np.array(groups, "S16").tobytes(),
            "counts": json.dumps(vars(counts)).encode(),
        }
        temporary, stored = task.path.with_suffix(".tmp"), [json.dumps(r).encode() for r in rows]
        write_table(temporary, [{"records": stored}], {"records": TEXT}, notes)
        temporary.rename(task.path)
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
            counts.bad += 1
            counts.empty += isinstance(error, EmptyRowError)
            counts.examples += [str(error)] * (len(counts.examples) < MAX_EXAMPLES)
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


class RowFiles:
    """The rows of several files, numbered from the first of the first one.

    Beside records, which are read when asked for, it has of each row:

    * ``digests``: (n,) 16 bytes of all that it is, b"" where it is not used;
    * ``sizes``: (n,) number of its records, 0 where it is not used;
    * ``groups``: (n,) 16 bytes of the prompt by which it is held out, b"" where it has none;
    * ``first_records``: (n + 1,) number of its first record among those of all rows, and of all;
    * ``prompts``: (sizes.sum(),) 16 bytes of each record's prompt, b"" where it has none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        notes = [read_table(path)[1] for path in paths]
        self._paths = paths
        self._mapped: dict[int, Column] = {}  # records of a file
        self.counts = RowCounts()
        for counts in (json.loads(each[b"counts"]) for each in notes):
            self.counts.by_type.update(counts["by_type"])
            self.counts.bad += counts["bad"]
            self.counts.empty += counts["empty"]
            self.counts.examples += counts["examples"]
        del self.counts.examples[MAX_EXAMPLES:]
        self.digests, self.groups, self.prompts = (
            np.frombuffer(b"".join(each[name] for each in notes), "S16")
            for name in (b"digests", b"groups", b"prompts")
        )
        self.sizes = np.frombuffer(b"".join(each[b"sizes"] for each in notes), np.int64)
        self.first_records = np.concatenate([[0], np.cumsum(self.sizes)])
        self._starts = np.cumsum([0, *(len(each[b"sizes"]) // 8 for each in notes)])

    def of_one_file(self, numbers: NDArray[np.int64]) -> list[RowRecords]:
        """The records of n >= 1 rows that are in one file, which stays mapped."""
        file = int(np.searchsorted(self._starts, numbers[0], side="right")) - 1
        if file not in self._mapped:
            (batch,), _ = read_table(self._paths[file])
            self._mapped[file] = batch["records"]
        stored = self._mapped[file]
        texts = [stored[number] for number in (numbers - self._starts[file]).tolist()]
        return [
            tuple(
                TextRecord(location, kind, tuple(map(Span._make, spans)), *rest)
                for location, kind, spans, *rest in row
            )
            for row in json.loads(b"[" + b",".join(texts) + b"]")
        ]

    def by_file(self, numbers: NDArray[np.int64]) -> Iterator[slice]:
        """Slices of sorted row numbers that are in one file each."""
        borders = np.searchsorted(numbers, self._starts)
        yield from (slice(a, b) for a, b in pairwise(borders) if b > a)

    def record_numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the records of these rows, in order."""
        sizes = self.sizes[rows]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(self.first_records[rows], sizes) + within

    def record(self, number: int) -> TextRecord:
        """A record by its number among those of all rows."""
        row = int(np.searchsorted(self.first_records, number, side="right")) - 1
        (records,) = self.of_one_file(np.array([row]))
        return records[int(number - self.first_records[row])]
