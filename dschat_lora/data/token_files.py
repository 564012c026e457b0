"""Files of the samples of some rows, with their counts, and the choice of samples from them."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.media import FIRST_ID
from dschat_lora.data.records import TextRecord
from dschat_lora.data.row_arrays import Indices
from dschat_lora.data.samples import AnySample, Columns, read_table, write_samples
from dschat_lora.data.tokenize import Tokenized, TokenRule, tokenize

# The records that one row becomes: one, or one for each answer of a conversation.
RowRecords = tuple[TextRecord, ...]

# What is counted of each record; the first two before anything was cut.
_COUNTED = np.dtype(
    [
        *((name, np.int64) for name in ("length", "prompt", "samples", "tokens", "supervised")),
        ("eos", np.int64),  # samples that end in the end-of-sequence
        ("empty_thoughts", np.int64),  # that are not learnt
        *(("media", np.int64), ("media_tokens", np.int64)),  # runs, and their tokens in samples
        *((name, bool) for name in ("truncated", "doubled_bos", "identical", "is_text")),
    ]
)


@dataclass(frozen=True)
class TokenWriter:
    """Makes samples of rows, and writes them with their counts."""

    encoder: Encoder
    rule: TokenRule

    def write(
        self, path: Path, rows: Sequence[RowRecords], notes: Mapping[str, bytes] | None = None
    ) -> None:
        """Write a file of rows' samples, which appears whole.

        Raises:
            ValueError: at a record that is too long, if it is to be an error.
        """
        records = [record for row in rows for record in row]
        results = tokenize(records, self.encoder, self.rule)
        samples: list[AnySample] = [each for result in results for each in result.samples]
        counted = {
            "sizes": np.array([len(row) for row in rows], np.int64).tobytes(),
            "counted": np.array([*map(self._counts, records, results)], _COUNTED).tobytes(),
            "methods": json.dumps([row[0].method if row else None for row in rows]).encode(),
        }
        temporary = path.with_suffix(".tmp")
        write_samples(temporary, samples, self.rule.kind, {**(notes or {}), **counted})
        temporary.rename(path)

    def _counts(self, record: TextRecord, result: Tokenized) -> tuple[int, ...]:
        samples, eos = result.samples, self.rule.eos_id
        seen = sum(int((each.input_ids >= FIRST_ID).sum()) for each in samples if record.media)
        return (
            result.length,
            result.prompt_length,
            len(samples),
            sum([len(each.input_ids) for each in samples]),
            sum([each.num_supervised for each in samples]),
            sum([result.ended or each.ends_in(eos) for each in samples]),
            result.empty_thoughts,
            len(record.media) if seen else 0,
            seen,
            result.truncated,
            result.doubled_bos,
            result.identical,
            result.is_text,
        )


@dataclass
class Tally:
    """Counts of the rows that were chosen for one token set, and of their samples."""

    rows: int = 0
    # How many rows are of a length, of the whole and of its parts, before any was cut: that of the
    # longest sample, where a row is several.
    lengths: Counter[int] = field(default_factory=Counter)
    prompts: Counter[int] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    # rows of messages by how their answers are found
    chat_rows: Counter[str] = field(default_factory=Counter)
    answer_samples: int = 0  # of rows that become one for each answer
    # Rows of which nothing is left: too long, or pairs of equal answers.
    dropped: int = 0
    identical: int = 0
    # Rows of which something is.
    partly_dropped: int = 0
    truncated: int = 0
    split: int = 0
    doubled_bos: int = 0
    media_rows: int = 0  # with inputs beside text
    # Samples, each as often as it is used.
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    eos: int = 0
    empty_thoughts: int = 0
    media: int = 0
    media_tokens: int = 0
    texts: int = 0  # samples of plain text
    text_eos: int = 0

    def choose(self, path: Path, times: NDArray[np.integer]) -> list[Columns]:
        """The samples of a file's rows, each as often as its row is used, in order; counts them.

        ``times`` (n,) are of the file's rows. Rows count once, however often they are used, and
        their samples each time.
        """
        batches, notes = read_table(path)
        records = np.frombuffer(notes[b"sizes"], np.int64)
        counted = np.frombuffer(notes[b"counted"], _COUNTED)
        uses = np.repeat(times, records)  # of each record
        self.rows += int(np.count_nonzero(times))
        for used, size, method in zip(
            times.tolist(), records.tolist(), json.loads(notes[b"methods"]), strict=True
        ):
            if used and method is not None:
                self.chat_rows[method] += 1
                self.answer_samples += size * (method == "answers")
        own, n = counted[uses > 0], uses[uses > 0]
        self._count_rows(own, records[(times > 0) & (records > 0)])
        sums = ("samples", "tokens", "supervised", "eos", "empty_thoughts", "media", "media_tokens")
        for name in sums:
            setattr(self, name, getattr(self, name) + int((n * own[name]).sum()))
        self.texts += int((n * own["samples"] * own["is_text"]).sum())
        self.text_eos += int((n * own["eos"] * own["is_text"]).sum())
        sample_uses = np.repeat(uses, counted["samples"])
        if (sample_uses == 1).all():
            return batches
        chosen, first = [], 0
        for columns in batches:
            size = len(columns["input_ids"].offsets) - 1
            rows = np.repeat(np.arange(size), sample_uses[first : first + size])
            chosen.append({name: column.take(rows) for name, column in columns.items()})
            first += size
        return chosen

    def _count_rows(self, counted: NDArray[np.void], records: Indices) -> None:
        """Count rows by what became of their ``records``, which are one or more of each."""
        if not len(records):
            return
        starts = np.cumsum(records) - records
        parts = {
            "lengths": counted["length"],
            "prompts": counted["prompt"],
            "answers": counted["length"] - counted["prompt"],
        }
        for name, sizes in parts.items():
            longest = np.maximum.reduceat(sizes, starts)
            values, numbers = np.unique(longest, return_counts=True)
            getattr(self, name).update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
        lost = (counted["samples"] == 0) & ~counted["identical"]
        lost, left, truncated, split, doubled, media = (
            np.logical_or.reduceat(each, starts)
            for each in (
                *(lost, counted["samples"] > 0, counted["truncated"]),
                *(counted["samples"] > 1, counted["doubled_bos"], counted["media"] > 0),
            )
        )
        for name, rows in {
            "dropped": lost & ~left,
            "identical": ~lost & ~left,
            "partly_dropped": lost & left,
            "truncated": truncated & ~lost,
            "split": split,
            "doubled_bos": doubled,
            "media_rows": media,
        }.items():
            setattr(self, name, getattr(self, name) + int(np.count_nonzero(rows)))


def quantile(counts: Mapping[int, int], share: float) -> int:
    """The least of the numbers that ``share`` in [0, 1] of all do not exceed; 0 without any."""
    numbers = np.array(sorted(counts.items()), np.int64).reshape(-1, 2)
    up_to = np.cumsum(numbers[:, 1])
    if not len(numbers):
        return 0
    place = np.searchsorted(up_to, max(1, math.ceil(share * int(up_to[-1]))))
    return int(numbers[place, 0])


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
    others = np.full(len(prompts), -1)
    if len(changes):
        following = np.searchsorted(changes, np.arange(len(order)), side="right")
        others[order] = lap[changes[following]]
    return others
