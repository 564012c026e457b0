"""Counts of a token set while it is written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from dschat_lora.data.row_files import RowRecords
from dschat_lora.data.tokenize import Tokenized


@dataclass
class Tally:
    """Counts of one token set, or of a part of it; those of parts add up."""

    rows: int = 0
    lengths: list[int] = field(default_factory=list)  # of every record, before any was cut
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


def add_up(parts: Sequence[Tally]) -> Tally:
    """The counts of all parts."""
    total = Tally()
    for part in parts:
        total.lengths.extend(part.lengths)
        total.chat_rows.update(part.chat_rows)
        for each in fields(Tally):
            if each.type is int:
                setattr(total, each.name, getattr(total, each.name) + getattr(part, each.name))
    return total
