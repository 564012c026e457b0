"""Tokens of rows as files with their counts, made by several processes and joined."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.record_files import RowFiles, RowRecords
from dschat_lora.data.samples import AnySample, is_whole, read_table, write_samples
from dschat_lora.data.tokenize import Tokenized, TokenRule, tokenize

Indices = NDArray[np.int64]


@dataclass
class Tally:
    """Counts of one token set, or of a part of it; those of parts add up."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)  # of every record, before any was cut
    prompts: list[int] = field(default_factory=list)  # of these, tokens of the prompt
    # rows of messages by how their answers are found
    chat_rows: Counter[str] = field(default_factory=Counter)
    answer_samples: int = 0  # of rows that become one for each answer
    dropped: int = 0
    identical: int = 0
    truncated: int = 0
    split: int = 0
    doubled_bos: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    eos: int = 0
    texts: int = 0  # samples of plain text
    text_eos: int = 0

    @classmethod
    def read(cls, path: Path) -> "Tally":
        """The counts of a file of samples."""
        values = json.loads(read_table(path)[1][b"tally"])
        return cls(**values | {"chat_rows": Counter(values["chat_rows"])})

    @classmethod
    def of(cls, parts: Sequence["Tally"]) -> "Tally":
        """The counts of all parts."""
        total = cls()
        for part in parts:
            total.lengths.extend(part.lengths)
            total.prompts.extend(part.prompts)
            total.chat_rows.update(part.chat_rows)
            for each in fields(cls):
                if each.type is int:
                    setattr(total, each.name, getattr(total, each.name) + getattr(part, each.name))
        return total

    def add_row(self, records: RowRecords) -> None:
        """Count a row once, however often it is used."""
        self.rows += 1
        method = records[0].method
        if method is not None:
            self.chat_rows[method] += 1
            self.answer_samples += len(records) * (method == "answers")

    def add(self, tokenized: Tokenized, times: int, *, eos_id: int) -> None:
        """Count one record that is used ``times`` times."""
        self.lengths.append(tokenized.length)
        self.prompts.append(tokenized.prompt_length)
        self.truncated += tokenized.truncated
        self.doubled_bos += tokenized.doubled_bos
        self.identical += tokenized.identical
        samples = tokenized.samples
        self.dropped += not (samples or tokenized.identical)
        self.split += bool(tokenized.rest)
        self.samples += times * len(samples)
        self.texts += times * len(samples) * tokenized.is_text
        for sample in samples:
            ends = times * (tokenized.ended or sample.ends_in(eos_id))
            self.tokens += times * len(sample.input_ids)
            self.supervised += times * sample.num_supervised
            self.eos += ends
            self.text_eos += ends * tokenized.is_text


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
    mismatched: Indices | None,
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


def mismatched_records(files: RowFiles, rows: Indices, train: Indices, *, seed: int) -> Indices:
    """For each record of these rows, the number of one with an answer to another prompt.

    Where all of them have one prompt, training rows lend their answers.

    Raises:
        ValueError: if these have no other prompt either.
    """
    own = pool = files.record_numbers(rows)
    if len(np.unique(files.prompts[own])) == 1:
        pool = np.concatenate([own, files.record_numbers(train)])
    found = mismatched(files.prompts[pool], seed=seed)[: len(own)]
    if (found < 0).any():
        raise ValueError(
            f"{files.record(int(own[0])).location}: --loss_type kto needs answers to two prompts "
            "or more, to estimate the KL divergence from those to other prompts; all rows have "
            "this one"
        )
    return pool[found]


def mismatched(prompts: NDArray[np.generic], *, seed: int) -> Indices:
    """For each of n answers, the number of one to another prompt, or -1 where all are to one.

    ``prompts`` (n,) are equal for answers to the same prompt. In an order drawn from ``seed``, it
    is the next such answer. Where KTO's paper rotates the answers within a batch, the answer of a
    record is thus the same in every epoch and whatever its batch.
    """
    order = permutation(len(prompts), "mismatched", seed)
    # A second lap, for the last ones' next is the first.
    lap = np.concatenate([order, order])
    changes = np.flatnonzero(prompts[lap[1:]] != prompts[lap[:-1]]) + 1
    found = np.full(len(prompts), -1)
    if len(changes):
        following = np.searchsorted(changes, np.arange(len(order)), side="right")
        found[order] = lap[changes[following]]
    return found
