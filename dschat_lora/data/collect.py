"""Rows of all sources, split into a held-out part and one part for each training step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.config.data import DataConfig, mixture_shares, parse_data_split
from dschat_lora.data.chat import Chat
from dschat_lora.data.record_files import RowCounts, RowFiles, RowReader, row_tasks
from dschat_lora.data.rows import DataKind, row_options
from dschat_lora.data.sources import Source
from dschat_lora.data.workers import map_in_order

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Collected:
    """Training and held-out rows of all sources, with counts of what was read."""

    kind: DataKind
    rows: RowFiles
    train: Indices  # numbers of rows, in order
    train_repeats: Indices
    eval: Indices
    counts: RowCounts
    duplicates: int  # rows of the training sources that equal an earlier one
    overlap: int
    shared_prompts: int  # held-out pairs with a prompt of training pairs
    first_rows: dict[int, int]  # number of the first row of each source that was read, in order
    times: dict[int, float]  # that a row of each training source is used per epoch, on average


class RowSplit(NamedTuple):
    """Row numbers of one source, in file order."""

    train: Indices  # of this phase
    eval: Indices  # of no phase


def collect(
    config: DataConfig,
    sources: Sequence[Source],
    chat: Chat,
    directory: Path,
    *,
    phase: int,
    seed: int,
    kind: DataKind,
    workers: int,
    on_rows: Callable[[int], object],
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
    files, parts, first, first_rows = RowFiles(paths), [], 0, {}
    for number, source in used.items():
        if not sizes[number]:
            raise ValueError(f"--{source.option} {source.entry} has no rows")
        first_rows[number] = first
        rows = np.arange(first, first := first + sizes[number])
        parts.append(_split_source(files, rows, config, source.option, number, phase, seed))
    weights = dict(enumerate(config.data_weights))
    if config.is_mixture and not config.streaming:
        own = {n: len(train) for n, (_, train, _) in zip(used, parts, strict=True) if len(train)}
        wanted = {n: sources[n].weight for n in own}
        weights = mixture_weights(own, wanted, config.mixture_temperature)
    none = np.zeros(0, np.int64)
    seen, train, held_out = (
        np.concatenate([none, *(part[place] for part in parts)]) for place in range(3)
    )
    times = np.concatenate(
        [
            none,
            *(
                repeats(len(part[1]), weights.get(number, 1.0), seed=seed, source=number)
                for number, part in zip(used, parts, strict=True)
            ),
        ]
    )
    train, times = train[times > 0], times[times > 0]
    overlaps = np.isin(files.digests[train], files.digests[held_out])
    kept = overlaps & bool(config.eval_data_path) | ~overlaps
    train, times = train[kept], times[kept]
    shared = 0
    if kind == "pairs" and len(files.prompts):
        prompts = files.prompts[files.first_records[1:] - 1]
        shared = int(np.isin(prompts[held_out], prompts[train]).sum())
    duplicates = len(seen) - len(np.unique(files.digests[seen]))
    return Collected(
        kind,
        files,
        train,
        times,
        held_out,
        files.counts,
        duplicates=duplicates,
        overlap=int(overlaps.sum()),
        shared_prompts=shared,
        first_rows=first_rows,
        times={n: weights.get(n, 1.0) for n in used if sources[n].option != "eval_data_path"},
    )


def _split_source(
    files: RowFiles,
    rows: Indices,
    config: DataConfig,
    option: str,
    number: int,
    phase: int,
    seed: int,
) -> tuple[Indices, Indices, Indices]:
    """Usable rows of a source: those of training sources, to train on, held out."""
    usable, none = files.sizes[rows] > 0, rows[:0]
    if option == "eval_data_path":
        return none, none, rows[usable]
    # Rows of one prompt are a group; a row without a prompt is a group of its own.
    groups = np.where(files.groups[rows] == b"", rows.astype("S16"), files.groups[rows])
    shares = parse_data_split(config.data_split) if config.data_split is not None else None
    split = split_rows(
        len(rows),
        groups=groups,
        shares=shares if option == "data_path" else None,
        phase=phase,
        eval_ratio=0.0 if config.eval_data_path else config.eval_ratio,
        seed=seed,
        source=number,
    )
    train, held_out = (rows[own][usable[own]] for own in split)
    return rows[usable], train, held_out


def split_rows(
    size: int,
    *,
    shares: tuple[float, float, float] | None,
    phase: int,
    eval_ratio: float,
    seed: int,
    source: int,
    groups: NDArray[np.generic] | Sequence[str] | None = None,
) -> RowSplit:
    """Split row numbers so that phases and held-out rows are disjoint for equal seeds.

    The held-out part is taken first and is the same for every phase; the rest is cut by
    ``shares`` of phases 1, 2 and 3, which sum to 1, or whole for every phase if None. ``size``
    counts unusable rows too, so that what a phase can use does not move the borders. Unless
    ``eval_ratio`` in [0, 1) is 0, at least one row of two or more is held out. Rows of equal
    ``groups`` are held out together or not at all, if there is a group of no more than half of
    the rows. The order depends on ``seed`` and the number ``source``.
    """
    keys = np.arange(size) if groups is None else np.asarray(groups)
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(first))[number]  # of each row, in the order of their first rows
    sizes = np.bincount(group)
    drawn = permutation(len(sizes), "split", seed, source)
    wanted = 0
    if eval_ratio > 0 and size >= 2:
        wanted = min(max(1, _round(eval_ratio * size)), size - 1)
    chosen = np.zeros(len(sizes), dtype=bool)
    chosen[drawn[_choose(sizes[drawn], wanted, size)]] = True
    places = np.argsort(drawn)  # of each group in the order drawn
    order = np.lexsort((places[group], ~chosen[group]))
    # Without a group small enough, rows are held out whatever their group.
    held_out = int(sizes[chosen].sum()) or wanted
    rest = order[held_out:]
    if shares is not None:
        borders = [_round(sum(shares[:step]) * len(rest)) for step in (phase - 1, phase)]
        rest = rest[borders[0] : borders[1]]
    return RowSplit(np.sort(rest), np.sort(order[:held_out]))


def _choose(sizes: Indices, wanted: int, size: int) -> list[int]:
    """The first groups that together have no more than ``wanted`` of ``size`` rows.

    Where all are larger, the smallest if it leaves half of the rows, else none.
    """
    chosen: list[int] = []
    count = 0
    for index, rows in enumerate(sizes.tolist()):
        if count == wanted:
            break
        if count + rows <= wanted:
            chosen.append(index)
            count += rows
    if wanted and not chosen:
        smallest = int(sizes.argmin())
        if sizes[smallest] <= size // 2:
            return [smallest]
    return chosen


def repeats(size: int, weight: float, *, seed: int, source: int) -> Indices:
    """How often each of ``size`` rows is used per epoch, ``weight`` times on average.

    2.5 uses every row twice and a seeded half of them once more.
    """
    counts = np.full(size, int(weight), dtype=np.int64)
    once_more = _round((weight - int(weight)) * size)
    counts[permutation(size, "weight", seed, source)[:once_more]] += 1
    return counts


def mixture_weights(
    rows: Mapping[int, int], wanted: Mapping[int, float | None], temperature: float
) -> dict[int, float]:
    """Times that rows of each source are used in an epoch, which has as many as all together.

    ``rows`` are the numbers of rows; sources without a ``wanted`` share count by them.
    """
    shares = mixture_shares({n: wanted[n] or size for n, size in rows.items()}, temperature)
    return {n: shares[n] * sum(rows.values()) / size for n, size in rows.items()}


def _round(value: float) -> int:
    """Halves up, unlike the built-in."""
    return int(value + 0.5)
