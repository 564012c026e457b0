"""Unpaired answers for KTO: each with its label, and with an answer to another prompt."""

from collections.abc import Sequence
from dataclasses import replace

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.chat import Span
from dschat_lora.data.collect import Collected
from dschat_lora.data.records import TextRecord


def unpair(rows: Collected, *, seed: int) -> Collected:
    """The same rows as single answers, those of a pair one by one, with mismatched answers.

    Raises:
        ValueError: if all rows have one prompt, to which no answer is mismatched.
    """
    train, times = [], []
    for row, repeat in zip(rows.train, rows.train_repeats, strict=True):
        answers = [answer for record in row for answer in answers_of(record)]
        train += answers
        times += [repeat] * len(answers)
    held_out = [each for row in rows.eval for record in row for each in answers_of(record)]
    return replace(
        rows,
        train=[(record,) for record in with_mismatched(train, train, seed=seed)],
        train_repeats=times,
        eval=[(record,) for record in with_mismatched(held_out, train, seed=seed)],
    )


def answers_of(record: TextRecord) -> list[TextRecord]:
    """The record itself; of a pair, the chosen answer as a desirable one and the rejected one."""
    if record.rejected is None:
        return [record]
    spans = (*record.spans[:-1], Span(record.rejected, target=True))
    return [
        replace(record, rejected=None, label=True),
        replace(record, spans=spans, rejected=None, label=False),
    ]


def with_mismatched(
    records: Sequence[TextRecord], others: Sequence[TextRecord], *, seed: int
) -> list[TextRecord]:
    """Each record with the answer of another one, which has another prompt.

    In an order drawn from ``seed`` it is that of the next such record. Where KTO's paper rotates
    the answers within a batch, the answer of a record is thus the same in every epoch and
    whatever its batch. Where all records have one prompt, ``others`` lend their answers.

    Raises:
        ValueError: if these have no other prompt either.
    """
    if not records:
        return []
    pool = list(records)
    if len({record.prompt for record in pool}) == 1:
        pool += others
    order = permutation(len(pool), "mismatched", seed).tolist()
    found: dict[int, str | None] = {}
    following: TextRecord | None = None  # the next with another prompt than ...
    last: TextRecord | None = None  # ... the next
    for index in [*order, *order][::-1]:  # a second lap, for the last ones' next is the first
        record = pool[index]
        if last is not None and last.prompt != record.prompt:
            following = last
        found[index] = following.completion if following is not None else None
        last = record
    if found[0] is None:
        raise ValueError(
            f"{records[0].location}: --loss_type kto needs answers to two prompts or more, to "
            "estimate the KL divergence from those to other prompts; all rows have this one"
        )
    return [replace(record, mismatched=found[i]) for i, record in enumerate(records)]
