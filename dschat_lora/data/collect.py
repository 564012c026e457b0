"""Records of all sources, split into training and evaluation sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dschat_lora.config.data import DataConfig, parse_data_split
from dschat_lora.data.chat import Chat
from dschat_lora.data.row_files import RowFiles
from dschat_lora.data.row_reader import RowCounts, RowReader, row_tasks
from dschat_lora.data.rows import DataKind, row_options
from dschat_lora.data.sources import Source
from dschat_lora.data.split import repeats, split_rows
from dschat_lora.data.workers import map_in_order

Indices = NDArray[np.int64]


@dataclass
class Collected:
    """Training and held-out rows of all sources, with counts of what was read."""

    kind: DataKind
    rows: RowFiles
    train: Indices  # numbers of rows, in order
    train_repeats: Indices
    eval: Indices
    counts: RowCounts
    duplicates: int  # rows of the training sources that equal an earlier one
    overlap: int = 0
    shared_prompts: int = 0  # held-out pairs with a prompt of training pairs


@dataclass
class _Assigned:
    """Rows of each source by part."""

    seen: list[Indices] = field(default_factory=list)  # of the training sources
    train: list[Indices] = field(default_factory=list)
    repeats: list[Indices] = field(default_factory=list)
    eval: list[Indices] = field(default_factory=list)


def collect(
    config: DataConfig,
    sources: Sequence[Source],
    chat: Chat,
    directory: Path,
    *,
    phase: int,
    seed: int,
    kind: DataKind = "samples",
    workers: int = 1,
    on_rows: Callable[[int], object] = lambda count: None,
) -> Collected:
    """Read, check and split the rows of all sources; their records are written to ``directory``.

    Files of records that are there already are taken as they are. ``on_rows`` is told how many
    rows were read, a few at a time.

    Raises:
        ValueError: for an empty source, and for a row that cannot be used unless ``--bad_rows
            skip``, naming file and row.
    """
    reader = RowReader(row_options(config), chat, kind, skips=config.bad_rows == "skip")
    used = {
        number: source
        for number, source in enumerate(sources)
        if phase == 1 or source.option != "sft_only_data_path"
    }
    sizes, paths = dict.fromkeys(used, 0), []
    for task in map_in_order(reader, row_tasks(used, directory), workers=workers):
        sizes[task.source] += task.size
        paths.append(task.path)
        on_rows(task.size)
    files, parts, first = RowFiles(paths), _Assigned(), 0
    for number, source in used.items():
        if not sizes[number]:
            raise ValueError(f"--{source.option} {source.entry} has no rows")
        rows = np.arange(first, first := first + sizes[number])
        _assign(parts, files, rows, config, source, number=number, phase=phase, seed=seed)
    return _collected(config, kind, files, parts)


def _assign(
    parts: _Assigned,
    files: RowFiles,
    rows: Indices,
    config: DataConfig,
    source: Source,
    *,
    number: int,
    phase: int,
    seed: int,
) -> None:
    """Add the rows of one source to the parts they belong to."""
    usable = files.sizes[rows] > 0
    if source.option == "eval_data_path":
        parts.eval.append(rows[usable])
        return
    shares = parse_data_split(config.data_split) if config.data_split is not None else None
    split = split_rows(
        len(rows),
        groups=_groups(files, rows),
        shares=shares if source.option == "data_path" else None,
        phase=phase,
        eval_ratio=0.0 if config.eval_data_path else config.eval_ratio,
        seed=seed,
        source=number,
    )
    train, held_out = (rows[own][usable[own]] for own in (split.train, split.eval))
    weight = config.data_weights[number] if number < len(config.data_weights) else 1.0
    times = repeats(len(train), weight, seed=seed, source=number)
    parts.seen.append(rows[usable])
    parts.train.append(train[times > 0])
    parts.repeats.append(times[times > 0])
    parts.eval.append(held_out)


def _groups(files: RowFiles, rows: Indices) -> NDArray[np.bytes_]:
    """(n,) equal for rows of one prompt; a row without a prompt is a group of its own."""
    groups = files.groups[rows]
    return np.where(groups == b"", rows.astype("S16"), groups)


def _collected(config: DataConfig, kind: DataKind, files: RowFiles, parts: _Assigned) -> Collected:
    seen, train, times, held_out = (
        np.concatenate([np.zeros(0, np.int64), *each])
        for each in (parts.seen, parts.train, parts.repeats, parts.eval)
    )
    counts = RowCounts()
    for each in files.counts:
        counts.merge(RowCounts(**each))
    overlaps = np.isin(files.digests[train], files.digests[held_out])
    kept = overlaps & bool(config.eval_data_path) | ~overlaps
    train, times = train[kept], times[kept]
    shared = 0
    if kind == "pairs" and len(files.prompts):
        prompts = files.prompts[files.first_records[1:] - 1]
        shared = int(np.isin(prompts[held_out], prompts[train]).sum())
    return Collected(
        kind,
        files,
        train,
        times,
        held_out,
        counts,
        duplicates=len(seen) - len(np.unique(files.digests[seen])),
        overlap=int(overlaps.sum()),
        shared_prompts=shared,
    )
