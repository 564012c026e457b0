"""Tokens of rows as files, made by several processes and joined."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dschat_lora.data.encoder import Encoder
from dschat_lora.data.row_files import RowFiles
from dschat_lora.data.samples import AnySample
from dschat_lora.data.store import is_whole, read_table, write_samples
from dschat_lora.data.tally import Tally
from dschat_lora.data.tokenize import TokenRule, tokenize

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class TokenTask:
    """Rows of one file that become samples."""

    path: Path
    rows: Indices  # numbers of rows
    repeats: Indices  # how often each is used
    mismatched: Indices | None  # numbers of records, for each record of the rows, of KTO


def token_tasks(
    directory: Path,
    name: str,
    rows: RowFiles,
    numbers: Indices,
    repeats: Indices,
    mismatched: Indices | None = None,
) -> Iterator[TokenTask]:
    """The rows of these numbers, in order, for one file of ``directory`` at a time."""
    before = np.concatenate([[0], np.cumsum(rows.sizes[numbers])])
    for file, own in enumerate(rows.by_file(numbers)):
        others = None
        if mismatched is not None:
            others = mismatched[before[own.start] : before[own.stop]]
        yield TokenTask(directory / f"{name}-{file:06}.arrow", numbers[own], repeats[own], others)


@dataclass(frozen=True)
class TokenWriter:
    """Writes the samples of a task's rows; called in worker processes."""

    files: RowFiles
    encoder: Encoder
    rule: TokenRule

    def __call__(self, task: TokenTask) -> Path:
        """The path of the file, which appears whole; one that is there already is taken as it is.

        Raises:
            ValueError: at a record that is too long, if it is to be an error.
        """
        if is_whole(task.path):
            return task.path
        tally = Tally()
        rows = self.files.of_one_file(task.rows)
        for row in rows:
            tally.add_row(row)
        records = [record for row in rows for record in row]
        if task.mismatched is not None:
            others = [self.files.record(int(number)).completion for number in task.mismatched]
            records = [r._replace(mismatched=o) for r, o in zip(records, others, strict=True)]
        times = np.repeat(task.repeats, [len(row) for row in rows]).tolist()
        samples: list[AnySample] = []
        for result, n in zip(tokenize(records, self.encoder, self.rule), times, strict=True):
            tally.add(result, n, eos_id=self.rule.eos_id)
            samples += result.samples * n
        temporary = task.path.with_suffix(".tmp")
        notes = {"tally": json.dumps(vars(tally)).encode()}
        write_samples(temporary, samples, self.rule.kind, notes)
        temporary.rename(task.path)
        return task.path


def read_tally(path: Path) -> Tally:
    """The counts of a file that was written."""
    values = json.loads(read_table(path).notes[b"tally"])
    return Tally(**values | {"chat_rows": Counter(values["chat_rows"])})
