"""Records of all sources, split into training and evaluation sets."""

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dschat_lora.config.data import DataConfig, parse_data_split
from dschat_lora.data.chat import Chat
from dschat_lora.data.readers import RowError, iter_rows
from dschat_lora.data.records import TextRecord, row_digest, to_records
from dschat_lora.data.rows import (
    DataKind,
    EmptyRowError,
    is_learnt,
    parse_row,
    require_usable,
    row_options,
)
from dschat_lora.data.sources import Source
from dschat_lora.data.split import Parts, repeats, split_rows

# The records that one row becomes: one, or one for each answer of a conversation.
RowRecords = tuple[TextRecord, ...]


@dataclass
class Collected:
    """Training and held-out rows of all sources, with counts of what was read."""

    kind: DataKind
    train: list[RowRecords] = field(default_factory=list)
    train_repeats: list[int] = field(default_factory=list)
    eval: list[RowRecords] = field(default_factory=list)
    by_type: Counter[str] = field(default_factory=Counter)
    bad: list[RowError] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)  # digests of rows of the training sources
    duplicates: int = 0
    overlap: int = 0
    shared_prompts: int = 0  # held-out pairs with a prompt of training pairs


def collect(
    config: DataConfig,
    sources: Sequence[Source],
    chat: Chat,
    *,
    phase: int,
    seed: int,
    kind: DataKind = "samples",
) -> Collected:
    """Read, check and split the rows of all sources.

    Raises:
        ValueError: for an empty source, and for a row that cannot be used unless ``--bad_rows
            skip``, naming file and row.
    """
    rows = Collected(kind)
    shares = parse_data_split(config.data_split) if config.data_split else None
    for number, source in enumerate(sources):
        if source.option == "eval_data_path":
            rows.eval += [r for r in _records(config, source, chat, rows, []) if r is not None]
            continue
        if source.option == "sft_only_data_path" and phase != 1:
            continue
        prompts: list[Hashable] = []
        records = list(_records(config, source, chat, rows, prompts))
        parts = split_rows(
            len(records),
            groups=prompts,
            shares=shares if source.option == "data_path" else None,
            phase=phase,
            eval_ratio=0.0 if config.eval_data_path else config.eval_ratio,
            seed=seed,
            source=number,
        )
        weight = config.data_weights[number] if number < len(config.data_weights) else 1.0
        _assign(rows, records, parts, weight=weight, seed=seed, number=number)
    _count_overlap(rows, remove=not config.eval_data_path)
    if kind == "pairs":
        trained = {records[-1].prompt for records in rows.train}
        rows.shared_prompts = sum(records[-1].prompt in trained for records in rows.eval)
    return rows


def _records(
    config: DataConfig, source: Source, chat: Chat, rows: Collected, prompts: list[Hashable]
) -> Iterator[RowRecords | None]:
    """Records of each row of a source; None, and an entry in ``rows.bad``, for an unusable row.

    ``prompts`` grows by one entry a row, equal for rows of one prompt whatever the stage makes
    of them, so that every stage holds out the same rows.
    """
    empty, options = True, row_options(config)
    types: Counter[str] = Counter() if source.option == "eval_data_path" else rows.by_type
    for raw in iter_rows(source):
        empty = False
        prompts.append(len(prompts))
        try:
            row = parse_row(raw, options)
            records = to_records(row, chat, rows.kind)
            prompts[-1] = records[-1].prompt or prompts[-1]
            require_usable(row, rows.kind, options)
            if not is_learnt(row, rows.kind):
                types[f"{row.described} with label false left out"] += 1
                yield None
                continue
            if rows.kind == "prompts":
                if not records[-1].prompt:
                    raise EmptyRowError(row.location, "there is nothing before the answer")
                # What JSON has no form for, such as a date, becomes text.
                columns = json.dumps(raw.values, ensure_ascii=False, default=str)
                records = tuple(replace(record, columns=columns) for record in records)
            types[row.described] += 1
            yield records
        except RowError as error:
            if config.bad_rows == "stop":
                raise
            rows.bad.append(error)
            yield None
    if empty:
        raise ValueError(f"--{source.option} {source.entry} has no rows")


def _assign(
    rows: Collected,
    records: Sequence[RowRecords | None],
    parts: Parts,
    *,
    weight: float,
    seed: int,
    number: int,
) -> None:
    """Add one source's records to the parts they belong to."""
    for row in records:
        if row is not None:
            digest = row_digest(row, rows.kind)
            rows.duplicates += digest in rows.seen
            rows.seen.add(digest)
    rows.eval += [row for i in parts.eval if (row := records[i]) is not None]
    train = [row for i in parts.train if (row := records[i]) is not None]
    times = repeats(len(train), weight, seed=seed, source=number)
    rows.train += [row for row, n in zip(train, times, strict=True) if n > 0]
    rows.train_repeats += [int(n) for n in times if n > 0]


def _count_overlap(rows: Collected, *, remove: bool) -> None:
    held_out = {row_digest(row, rows.kind) for row in rows.eval}
    kept = [i for i, row in enumerate(rows.train) if row_digest(row, rows.kind) not in held_out]
    rows.overlap = len(rows.train) - len(kept)
    if remove:
        rows.train = [rows.train[index] for index in kept]
        rows.train_repeats = [rows.train_repeats[index] for index in kept]
