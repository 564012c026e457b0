"""Rows of sources as files of records or of samples, written by several processes."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dschat_lora.config.stages import ANSWER_LOSSES
from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.readers import Line, RawRow, RowError, iter_unread
from dschat_lora.data.records import TextRecord, answers_of, row_digest, to_records
from dschat_lora.data.row_arrays import Indices, RowArrays, first_equals
from dschat_lora.data.rows import (
    DataKind,
    EmptyRowError,
    RowOptions,
    at_bad_row,
    is_learnt,
    parse_row,
    require_usable,
)
from dschat_lora.data.samples import TEXT, Column, is_whole, read_table, write_table
from dschat_lora.data.sources import DataSource
from dschat_lora.data.token_files import RowRecords, TokenWriter, mismatched

MAX_EXAMPLES = 100  # bad rows that are kept
ROWS_PER_FILE = 1000
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
    # of training sources: what the chat template or the loss leaves out, in how many rows
    left_out: Counter[str] = field(default_factory=Counter)


def row_tasks(sources: Mapping[int, DataSource], directory: Path) -> Iterator[RowTask]:
    """The rows of all sources in order, for one file of ``directory`` at a time."""
    file = 0
    for number, source in sources.items():
        unread = iter_unread(source)
        while rows := _group(unread):
            path = directory / f"rows-{file:06}.arrow"
            yield RowTask(number, source.option, path, [] if is_whole(path) else rows, len(rows))
            file += 1


def _group(unread: Iterator[RawRow | Line]) -> list[RawRow | Line]:
    """The next rows of a file of records."""
    rows: list[RawRow | Line] = []
    size = 0
    while len(rows) < ROWS_PER_FILE and size < BYTES_PER_FILE and (row := next(unread, None)):
        rows.append(row)
        size += row.size
    return rows


@dataclass(frozen=True)
class RowReader:
    """Writes the records of a task's rows, or their samples; called in worker processes."""

    options: RowOptions
    chat: Chat
    kind: DataKind
    skips: bool  # rows that cannot be used, which stop it otherwise
    tokens: TokenWriter | None = None  # of samples

    def __call__(self, task: RowTask) -> RowTask:
        """The task without its rows, whose file appears whole.

        Raises:
            RowError: for a row that cannot be used.
        """
        if not task.rows:
            return task
        counts = RowCounts()
        rows: list[RowRecords] = []
        digests, groups, none = [], [], bytes(16)
        for unread in task.rows:
            records, group = self.records(unread.read(), counts)
            # Of rows that are not used nothing but the prompt is known.
            digests.append(row_digest(records, self.kind) if records else none)
            groups.append(group or none)
            rows.append(answers_of(*records) if self.kind == "unpaired" else records)
        if task.option == "eval_data_path":
            counts.by_type.clear()
            counts.left_out.clear()
        notes = {
            "digests": b"".join(digests),
            "groups": b"".join(groups),
            "counts": json.dumps(vars(counts)).encode(),
        }
        if self.tokens is not None:
            self.tokens.write(task.path, rows, notes)
            return replace(task, rows=[])
        notes["sizes"] = np.array([len(row) for row in rows], np.int64).tobytes()
        if self.kind == "unpaired":  # answers to other prompts will be looked for
            answers = [record for row in rows for record in row]
            notes["prompts"] = b"".join([r.group if r.prompt else none for r in answers])
        temporary = task.path.with_suffix(".tmp")
        stored = Column.of([json.dumps(row).encode() for row in rows], TEXT)
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
                group = records[-1].group
            require_usable(row, self.kind, self.options)
            if not is_learnt(row, self.kind):
                counts.by_type[f"{row.described} with label false left out"] += 1
                return (), group
            if self.kind == "prompts":
                if not prompt:
                    raise EmptyRowError(row.location, "there is no prompt before the answer")
                kept, media = raw.values, self.options.media
                if media is not None:
                    kept = media.columns(kept, row.values)
                # What JSON has no form for, such as a date, becomes text.
                columns = json.dumps(kept, ensure_ascii=False, default=str)
                records = tuple(record._replace(columns=columns) for record in records)
            _require_unicode(row.location, records)
            counts.by_type[row.described] += 1
            counts.left_out.update(records[0].left_out)
            return records, group
        except RowError as error:
            if not self.skips:
                raise at_bad_row(error) from None
            counts.bad += 1
            counts.empty += isinstance(error, EmptyRowError)
            counts.examples += [str(error)] * (len(counts.examples) < MAX_EXAMPLES)
            return (), group


def _require_unicode(location: str, records: RowRecords) -> None:
    """Refuse half a surrogate pair, which JSON can hold and no tokenizer reads."""
    for record in records:
        texts = [span.text for span in record.spans]
        for text in (*texts, record.rejected or "", record.columns):
            try:
                text.isascii() or text.encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                reason = f"{half!a} is half a character (a lone surrogate)"
                raise RowError(location, reason) from error


class RowFiles:
    """The rows of several files, numbered from the first of the first one.

    It has of each row:

    * ``digests``: (n, 2) uint64, 16 bytes of all that it is, 0 where it is not used;
    * ``groups``: (n, 2) likewise of the prompt by which it is held out, 0 where it has none;
    * ``sizes``: (n,) number of its records, 0 where it is not used.
    """

    def __init__(self, paths: Sequence[Path], sources: Sequence[int], arrays: RowArrays) -> None:
        """``sources`` are the numbers of the files' sources."""
        self.paths, self.sources = paths, sources
        self._mapped: dict[int, Column] = {}  # records of a file
        self.counts = RowCounts()
        lengths, prompts = [], 0
        for path in paths:
            notes = read_table(path)[1]
            lengths.append(len(notes[b"sizes"]) // 8)
            prompts += len(notes.get(b"prompts", b"")) // 16
            counts = json.loads(notes[b"counts"])
            self.counts.by_type.update(counts["by_type"])
            self.counts.left_out.update(counts["left_out"])
            self.counts.bad += counts["bad"]
            self.counts.empty += counts["empty"]
            room = MAX_EXAMPLES - len(self.counts.examples)
            self.counts.examples += counts["examples"][:room]
        self.starts = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
        self.size: int = self.starts[-1]
        self.digests, self.groups = (arrays.zeros(self.size, 2, dtype=np.uint64) for _ in range(2))
        self.sizes = arrays.zeros(self.size)
        self._prompts = arrays.zeros(prompts, 2, dtype=np.uint64)  # of each record, of answers
        self._arrays, first = arrays, 0
        for path, own in zip(paths, self.slices, strict=True):
            notes = read_table(path)[1]
            self.digests[own] = np.frombuffer(notes[b"digests"], np.uint64).reshape(-1, 2)
            self.groups[own] = np.frombuffer(notes[b"groups"], np.uint64).reshape(-1, 2)
            self.sizes[own] = np.frombuffer(notes[b"sizes"], np.int64)
            of_records = np.frombuffer(notes.get(b"prompts", b""), np.uint64).reshape(-1, 2)
            self._prompts[first : first + len(of_records)] = of_records
            first += len(of_records)

    @property
    def slices(self) -> list[slice]:
        """The rows of each file."""
        return [slice(*ends) for ends in pairwise(self.starts)]

    @property
    def source_slices(self) -> dict[int, slice]:
        """The rows of each source, by its number."""
        ends = {source: own.stop for source, own in zip(self.sources, self.slices, strict=True)}
        starts = [0, *ends.values()]
        return {number: slice(*each) for number, each in zip(ends, pairwise(starts), strict=True)}

    def records(self, file: int, rows: Sequence[int]) -> list[RowRecords]:
        """The records of these rows of a file, counted from its first, which stays mapped."""
        if file not in self._mapped:
            (batch,), _ = read_table(self.paths[file])
            self._mapped[file] = batch["records"]
        stored = self._mapped[file]
        texts = [stored[row] for row in rows]
        return [
            tuple(
                TextRecord(location, kind, tuple(map(Span._make, spans)), *rest)
                for location, kind, spans, *rest in row
            )
            for row in json.loads(b"[" + b",".join(texts) + b"]")
        ]

    def mismatched(
        self, rows: NDArray[np.bool_], train: NDArray[np.bool_], *, seed: int
    ) -> Indices:
        """For each record of these rows, the number of one with an answer to another prompt.

        Where all of them have one prompt, training rows lend their answers. Records are numbered
        from the first of all rows.

        Raises:
            ValueError: if these have no other prompt either.
        """
        own = pool = np.flatnonzero(np.repeat(rows, self.sizes))
        prompts = first_equals(self._prompts, self._arrays)
        if len(np.unique(prompts[own])) == 1:
            pool = np.concatenate([own, np.flatnonzero(np.repeat(train, self.sizes))])
        others = mismatched(prompts[pool], seed=seed)[: len(own)]
        if (others < 0).any():
            raise ValueError(
                f"{self.record(int(own[0])).location}: --loss_type {' or '.join(ANSWER_LOSSES)} "
                "needs answers to at least two prompts, to estimate the KL divergence from "
                "mismatched ones; all rows have this prompt"
            )
        return pool[others]

    @cached_property
    def _ends(self) -> Indices:
        """(n,) records up to the end of each row."""
        return np.cumsum(self.sizes)

    def record(self, number: int) -> TextRecord:
        """A record by its number among those of all rows."""
        row = int(np.searchsorted(self._ends, number, side="right"))
        file = bisect_right(self.starts, row) - 1
        (records,) = self.records(file, [row - self.starts[file]])
        return records[number - int(self._ends[row]) + len(records)]


@dataclass(frozen=True)
class TokenTask:
    """Rows of one file of records that become a file of samples."""

    path: Path
    file: int
    rows: list[int]  # counted from the file's first
    mismatched: list[int] | None  # of KTO: for each record of the rows, the number of another


def token_tasks(
    files: RowFiles, used: NDArray[np.bool_], mismatched: Indices | None, directory: Path
) -> Iterator[TokenTask]:
    """Tasks of the ``used`` (n,) of all rows; files without any have none.

    ``mismatched`` (m,) are of all their records, in order.
    """
    first = 0
    for file, own in enumerate(files.slices):
        rows = np.flatnonzero(used[own])
        others = None
        if mismatched is not None:
            last = first + int(files.sizes[own][rows].sum())
            others, first = mismatched[first:last].tolist(), last
        if len(rows):
            yield TokenTask(directory / f"tokens-{file:06}.arrow", file, rows.tolist(), others)


@dataclass(frozen=True)
class RecordTokenizer:
    """Writes the samples of a task's rows; called in worker processes."""

    files: RowFiles
    tokens: TokenWriter

    def __call__(self, task: TokenTask) -> TokenTask:
        """The task; a file that is there already is taken as it is.

        Raises:
            ValueError: at a record that is too long, if it is to be an error.
        """
        if not is_whole(task.path):
            rows = self.files.records(task.file, task.rows)
            if task.mismatched is not None:
                others = iter([self.files.record(n).completion for n in task.mismatched])
                rows = [tuple(r._replace(mismatched=next(others)) for r in row) for row in rows]
            self.tokens.write(task.path, rows)
        return task
