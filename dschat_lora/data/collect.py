"""Rows of all sources, split into a held-out part and one part for each training step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.config.data import DataConfig, mixture_shares, parse_data_split
from dschat_lora.data.chat import Chat
from dschat_lora.data.media import MediaReader
from dschat_lora.data.record_files import RowCounts, RowFiles, RowReader, RowTask, row_tasks
from dschat_lora.data.row_arrays import Indices, RowArrays, chunks, first_equals
from dschat_lora.data.rows import DataKind, row_options
from dschat_lora.data.sources import DataSource
from dschat_lora.data.token_files import TokenWriter
from dschat_lora.data.workers import map_in_order

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Collected:
    """Training and held-out rows of all sources, with counts of what was read."""

    kind: DataKind
    rows: RowFiles
    times: NDArray[np.int32]  # (n,) that each row is used per epoch, 0 where it is not trained on
    eval: Mask  # (n,) rows that are held out
    counts: RowCounts
    duplicates: int  # rows of the training sources that equal an earlier one
    overlap: int
    shared_prompts: int  # held-out pairs with a prompt of training pairs
    source_times: dict[int, float]  # that a row of each training source is used, on average


class RowSplit(NamedTuple):
    """Rows of one source, (n,) in file order."""

    train: Mask  # of this phase
    eval: Mask  # of no phase


def collect(
    config: DataConfig,
    sources: Sequence[DataSource],
    chat: Chat,
    directory: Path,
    *,
    phase: int,
    seed: int,
    kind: DataKind,
    workers: int,
    on_rows: Callable[[int], object],
    tokens: TokenWriter | None = None,
    media: MediaReader | None = None,
) -> Collected:
    """Read, check and split the rows of all sources.

    Their records are written to ``directory``, or with ``tokens`` their samples. Files that are
    there already are taken as they are. ``on_rows`` is told how many rows were read, a few at a
    time.

    Raises:
        ValueError: for an empty source, and for a row that cannot be used unless ``--bad_rows
            skip``, naming file and row.
    """
    used = {
        number: source
        for number, source in enumerate(sources)
        if phase == 1 or source.option != "sft_only_data_path"
    }
    skips = config.bad_rows == "skip"
    reader = RowReader(row_options(config, media), chat, kind, skips, tokens)
    tasks = map_in_order(reader, row_tasks(used, directory), workers=workers)
    files = _read(used, tasks, arrays := RowArrays(directory), on_rows)
    slices = files.source_slices
    seen, train, held_out = _split(config, used, files, arrays, phase=phase, seed=seed)
    weights = dict(enumerate(config.data_weights))
    counted = {number: int(train[rows].sum()) for number, rows in slices.items()}
    if config.is_mixture and config.tail is None:
        own = {number: size for number, size in counted.items() if size}
        shares = mixture_shares({number: sources[number].weight or 0.0 for number in own})
        # An epoch has as many rows as all sources together.
        weights = {n: share * sum(own.values()) / own[n] for n, share in shares.items()}
    times = arrays.zeros(files.size, dtype=np.int32)
    for number, rows in slices.items():
        weight = weights.get(number, 1.0)
        times[rows][train[rows]] = repeats(counted[number], weight, seed=seed, source=number)
    same = first_equals(files.digests, arrays)
    duplicates = int(seen.sum()) - int(_values_of(same, seen).sum())
    overlap = _count_others(same, held_out, times, drop=not config.eval_data_path)
    shared = 0
    if kind == "pairs":
        prompts = first_equals(files.groups, arrays)
        shared = _count_others(prompts, times > 0, held_out, drop=False)
    return Collected(
        kind,
        files,
        times,
        held_out,
        files.counts,
        duplicates=duplicates,
        overlap=overlap,
        shared_prompts=shared,
        source_times={
            n: weights.get(n, 1.0) for n in used if sources[n].option != "eval_data_path"
        },
    )


def _read(
    sources: Mapping[int, DataSource],
    tasks: Iterable[RowTask],
    arrays: RowArrays,
    on_rows: Callable[[int], object],
) -> RowFiles:
    sizes, paths, numbers = dict.fromkeys(sources, 0), [], []
    for task in tasks:
        sizes[task.source] += task.size
        paths.append(task.path)
        numbers.append(task.source)
        on_rows(task.size)
    for number, source in sources.items():
        if not sizes[number]:
            raise ValueError(f"--{source.option} {source.entry} has no rows")
    return RowFiles(paths, numbers, arrays)


def _split(
    config: DataConfig,
    sources: Mapping[int, DataSource],
    files: RowFiles,
    arrays: RowArrays,
    *,
    phase: int,
    seed: int,
) -> tuple[Mask, Mask, Mask]:
    """(n,) usable rows of training sources, those to train on, and held-out ones of any source."""
    seen, train, held_out = (arrays.zeros(files.size, dtype=bool) for _ in range(3))
    for number, rows in files.source_slices.items():
        source, usable = sources[number], files.sizes[rows] > 0
        if source.option == "eval_data_path":
            held_out[rows] = usable
            continue
        seen[rows] = usable
        shares = None
        if config.data_split is not None and source.option == "data_path":
            shares = parse_data_split(config.data_split)
        # Rows of one prompt are a group; a row without a prompt is a group of its own.
        split = split_rows(
            first_equals(files.groups[rows], arrays),
            arrays,
            shares=shares,
            phase=phase,
            eval_ratio=0.0 if config.eval_data_path else config.eval_ratio,
            seed=seed,
            source=number,
        )
        train[rows], held_out[rows] = split.train & usable, split.eval & usable
    return seen, train, held_out


def _count_others(numbers: Indices, rows: Mask, others: NDArray[np.generic], *, drop: bool) -> int:
    """How many ``others`` (n,), where they are not 0, have the number of one of the rows.

    With ``drop`` these become 0.
    """
    is_number, count = _values_of(numbers, rows), 0
    for part in chunks(len(numbers)):
        own = is_number[numbers[part]] & (others[part] != 0)
        count += int(own.sum())
        if drop:
            others[part][own] = 0
    return count


def _values_of(numbers: Indices, rows: Mask) -> Mask:
    """(n,) whether a number below n is that of one of the rows."""
    is_number = np.zeros(len(numbers), bool)
    for part in chunks(len(numbers)):
        is_number[numbers[part][rows[part]]] = True
    return is_number


def split_rows(
    first: Indices,
    arrays: RowArrays,
    *,
    shares: tuple[float, float, float] | None,
    phase: int,
    eval_ratio: float,
    seed: int,
    source: int,
) -> RowSplit:
    """Split rows so that phases and held-out rows are disjoint for equal seeds.

    The held-out part is taken first and is the same for every phase; the rest is cut by
    ``shares`` of phases 1, 2 and 3, which sum to 1, or whole for every phase if None. Unless
    ``eval_ratio`` in [0, 1) is 0, at least one row of two or more is held out. ``first`` (n,) is
    the number of the first row of each row's group, which is held out as a whole or not at all, if
    there is a group of no more than half of the rows. Rows that cannot be used count too, so that
    they do not move the borders. The order depends on ``seed`` and the number ``source``.
    """
    size = len(first)
    group, sizes = _number_groups(first, arrays)
    count, begin = len(sizes), arrays.zeros(len(sizes))
    drawn = permutation(count, "split", seed, source, out=arrays.zeros(count))
    wanted = 0
    if eval_ratio > 0 and size >= 2:
        wanted = min(max(1, _round(eval_ratio * size)), size - 1)
    chosen = _choose(sizes, drawn, wanted, size)
    # Where each group's rows begin in an order that has the chosen ones before the others.
    end = 0
    for are_chosen in (True, False):
        for part in chunks(count):
            groups = drawn[part][chosen[drawn[part]] == are_chosen]
            ends = end + np.cumsum(sizes[groups])
            begin[groups] = ends - sizes[groups]
            end = int(ends[-1]) if len(ends) else end
    # Without a group small enough, rows are held out whatever their group.
    held_out = sum(int(sizes[part][chosen[part]].sum()) for part in chunks(count)) or wanted
    low, high = 0.0, 1.0
    if shares is not None:
        low, high = sum(shares[: phase - 1]), sum(shares[:phase])
    rest = size - held_out
    borders = held_out + _round(low * rest), held_out + _round(high * rest)
    held = _rows_between(group, begin, sizes, (0, held_out), arrays)
    return RowSplit(_rows_between(group, begin, sizes, borders, arrays), held)


def _number_groups(first: Indices, arrays: RowArrays) -> tuple[Indices, Indices]:
    """(n,) the group of each row, numbered in the order of their first rows, and their sizes."""
    group, count = arrays.zeros(len(first)), 0
    for part in chunks(len(first)):
        begins = first[part] == np.arange(part.start, part.stop)
        group[part] = count - 1 + np.cumsum(begins)
        count += int(begins.sum())
    sizes = arrays.zeros(count)
    for part in chunks(len(first)):
        group[part] = group[first[part]]
        np.add.at(sizes, group[part], 1)
    return group, sizes


def _rows_between(
    group: Indices, begin: Indices, sizes: Indices, borders: tuple[int, int], arrays: RowArrays
) -> Mask:
    """(n,) the rows whose places are between these, where groups ``begin`` at theirs."""
    low, high = borders
    between = arrays.zeros(len(group), dtype=bool)
    across: set[int] = set()  # groups of which only a part is between
    for part in chunks(len(sizes)):
        for border in borders:
            inside = (begin[part] < border) & (border < begin[part] + sizes[part])
            across.update((part.start + np.flatnonzero(inside)).tolist())
    for part in chunks(len(group)):
        start = begin[group[part]]
        between[part] = (start >= low) & (start + sizes[group[part]] <= high)
    for each in across:
        rows = [part.start + np.flatnonzero(group[part] == each) for part in chunks(len(group))]
        places = begin[each] + np.arange(sizes[each])
        between[np.concatenate(rows)] = (places >= low) & (places < high)
    return between


def _choose(sizes: Indices, drawn: Indices, wanted: int, size: int) -> Mask:
    """The first groups ``drawn`` that together have no more than ``wanted`` of ``size`` rows.

    Where all are larger, the smallest if it leaves half of the rows, else none.
    """
    chosen, count = np.zeros(len(sizes), bool), 0
    for part in chunks(len(drawn)):
        for group, rows in zip(drawn[part].tolist(), sizes[drawn[part]].tolist(), strict=True):
            if count == wanted:
                return chosen
            if count + rows <= wanted:
                chosen[group] = True
                count += rows
    if wanted and not count:
        smallest = int(drawn[sizes[drawn].argmin()])
        chosen[smallest] = sizes[smallest] <= size // 2
    return chosen


def repeats(size: int, weight: float, *, seed: int, source: int) -> NDArray[np.int32]:
    """How often each of ``size`` rows is used per epoch, ``weight`` times on average.

    2.5 uses every row twice and a seeded half of them once more.
    """
    counts = np.broadcast_to(np.int32(weight), size)
    if once_more := _round((weight - int(weight)) * size):
        counts = counts.copy()
        counts[permutation(size, "weight", seed, source)[:once_more]] += 1
    return counts


def _round(value: float) -> int:
    """Halves up, unlike the built-in."""
    return int(value + 0.5)
