"""Unpaired answers for KTO: each with its label, and with an answer to another prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.chat import Span
from dschat_lora.data.records import TextRecord
from dschat_lora.data.row_files import RowFiles


def answers_of(record: TextRecord) -> list[TextRecord]:
    """The record itself; of a pair, the chosen answer as a desirable one and the rejected one."""
    if record.rejected is None:
        return [record]
    spans = (*record.spans[:-1], Span(record.rejected, target=True))
    return [
        record._replace(rejected=None, label=True),
        record._replace(spans=spans, rejected=None, label=False),
    ]


def answers_of_row(records: Sequence[TextRecord]) -> tuple[TextRecord, ...]:
    """The answers of all records of a row; see :func:`answers_of`."""
    return tuple(each for record in records for each in answers_of(record))


def mismatched_records(
    files: RowFiles, rows: NDArray[np.int64], train: NDArray[np.int64], *, seed: int
) -> NDArray[np.int64]:
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


def mismatched(prompts: NDArray[np.generic], *, seed: int) -> NDArray[np.int64]:
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
