"""Records of rows on disk: files of up to a thousand rows, memory-mapped."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dschat_lora.data.chat import Span
from dschat_lora.data.records import TextRecord, text_digest
from dschat_lora.data.store import TEXT, read_table, write_table

ROWS_PER_FILE = 1000

# The records that one row becomes: one, or one for each answer of a conversation.
RowRecords = tuple[TextRecord, ...]


def write_rows(
    path: Path,
    rows: Sequence[RowRecords],
    *,
    digests: Sequence[bytes],
    groups: Sequence[bytes],
    counts: dict[str, Any],
) -> None:
    """Write the records of rows, none for a row that is not used; the file appears whole."""
    prompts = [_prompt_digest(record) for row in rows for record in row]
    notes = {
        "digests": np.array(digests, "S16").tobytes(),
        "sizes": np.array([len(row) for row in rows], np.int64).tobytes(),
        "prompts": np.array(prompts, "S16").tobytes(),
        "groups": np.array(groups, "S16").tobytes(),
        "counts": json.dumps(counts).encode(),
    }
    stored = [json.dumps(row).encode() for row in rows]
    temporary = path.with_suffix(".tmp")
    write_table(temporary, [{"records": stored}] if rows else [], {"records": TEXT}, notes)
    temporary.rename(path)


class RowFiles:
    """The rows of several files, numbered from the first of the first one.

    Beside records, which are read when asked for, it has of each row:

    * ``digests``: (n,) 16 bytes of all that it is, b"" where it is not used;
    * ``sizes``: (n,) number of its records, 0 where it is not used;
    * ``groups``: (n,) 16 bytes of the prompt by which it is held out, b"" where it has none;
    * ``prompts``: (sizes.sum(),) 16 bytes of each record's prompt, b"" where it has none.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        notes = [read_table(path).notes for path in paths]
        self._paths = paths
        self._mapped: dict[int, Any] = {}
        self.counts: list[dict[str, Any]] = [json.loads(each[b"counts"]) for each in notes]
        self.digests, self.groups, self.prompts = (
            np.frombuffer(b"".join(each[name] for each in notes), "S16")
            for name in (b"digests", b"groups", b"prompts")
        )
        self.sizes = np.frombuffer(b"".join(each[b"sizes"] for each in notes), np.int64)
        self._starts = np.cumsum([0, *(len(each[b"sizes"]) // 8 for each in notes)])

    def of_one_file(self, numbers: NDArray[np.int64]) -> list[RowRecords]:
        """The records of n >= 1 rows that are in one file."""
        file = int(np.searchsorted(self._starts, numbers[0], side="right")) - 1
        stored = self._records(file)
        texts = [stored[number] for number in (numbers - self._starts[file]).tolist()]
        rows = json.loads(b"[" + b",".join(texts) + b"]")
        return [tuple(map(_from_list, row)) for row in rows]

    def by_file(self, numbers: NDArray[np.int64]) -> Iterator[slice]:
        """Slices of sorted row numbers that are in one file each."""
        borders = np.searchsorted(numbers, self._starts)
        yield from (slice(a, b) for a, b in pairwise(borders) if b > a)

    def _records(self, file: int) -> Any:
        """The column of records of a file, which stays mapped."""
        if file not in self._mapped:
            (batch,) = read_table(self._paths[file]).batches
            self._mapped[file] = batch["records"]
        return self._mapped[file]

    @cached_property
    def first_records(self) -> NDArray[np.int64]:
        """(rows + 1,) number of each row's first record among those of all rows, and of all."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

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


def _prompt_digest(record: TextRecord) -> bytes:
    prompt = record.prompt
    return text_digest(prompt) if prompt else b""


def _from_list(values: list[Any]) -> TextRecord:
    location, kind, spans, *rest = values
    return TextRecord(location, kind, tuple(map(Span._make, spans)), *rest)
