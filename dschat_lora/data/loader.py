"""Packing of samples into rows, and the micro-batches of each optimizer step for one rank."""

import hashlib
import heapq
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.cache import code_digest, load_or_build
from dschat_lora.data.samples import Samples, SourcedSamples, TokenSet

if TYPE_CHECKING:
    from dschat_lora.config.data import DataConfig
    from dschat_lora.data.prepare import Prepared

Integers = NDArray[np.int64]
PackedRow = tuple[int, ...]  # sample indices
ITEMS_AT_A_TIME = 2**16  # of which there are Python objects


class PackedRows(Sequence[PackedRow]):
    """Rows of sample indices, of which no Python object is kept."""

    def __init__(self, samples: Integers, ends: Integers) -> None:
        """``samples`` (n,) are those of all rows, ``ends`` (rows,) where each row ends in them."""
        self.samples, self.ends = samples, ends

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "PackedRows":
        """These rows."""
        if isinstance(rows, PackedRows):
            return rows
        rows = list(rows)
        samples = np.fromiter(chain.from_iterable(rows), np.int64)
        return cls(samples, np.cumsum([len(row) for row in rows], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        end = int(self.ends[index])
        start = int(self.ends[index - 1]) if index % len(self) else 0
        return tuple(self.samples[start:end].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class SampleCounts:
    """Counts of each sample or pair in its rows, (n,) int64."""

    tokens: Integers
    targets: Integers  # supervised predictions
    attended: Integers  # (query, key) pairs of causal attention
    positions: Integers  # of rows for this sample alone, padding included
    chosen_targets: Integers  # predictions of a pair's chosen answer, else 0


def make_rows(lengths: Integers, *, max_seq_len: int, packing: bool, seed: int) -> PackedRows:
    """Rows of sample indices, made once a run: every epoch permutes the same rows.

    ``lengths`` are (n,) tokens of each sample, at most ``max_seq_len``. Without ``packing`` each
    sample is a row; with it, samples are packed first-fit in a seeded order.
    """
    if not packing:
        return PackedRows(np.arange(len(lengths)), np.arange(1, len(lengths) + 1))
    order = permutation(len(lengths), "packing", seed)
    packed = first_fit(lengths[order], max_seq_len)
    return PackedRows(order[packed.samples], packed.ends)


def first_fit(lengths: Integers, capacity: int) -> PackedRows:
    """Places of (n,) ``lengths`` in rows: each goes into the first row that has room for it.

    O(n log n): a tree over all rows holds the most room in each subtree, and the first row
    with enough of it is found from the root down.

    Raises:
        ValueError: if an item is longer than ``capacity``.
    """
    if lengths.max(initial=0) > capacity:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit a row of {capacity}")
    row_of = np.zeros(len(lengths), np.int32)
    # Of the node n of the tree the children are 2 n and 2 n + 1; one leaf at least is unused.
    room, leaves, rows = [capacity] * 2, 1, 0
    for start in range(0, len(lengths), ITEMS_AT_A_TIME):
        for position, length in enumerate(lengths[start : start + ITEMS_AT_A_TIME].tolist(), start):
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < length:
                    node += 1
            row_of[position] = node - leaves
            rows = max(rows, node - leaves + 1)
            room[node] -= length
            while node > 1:
                node //= 2
                room[node] = max(room[2 * node], room[2 * node + 1])
            if rows == leaves:
                level = [*room[leaves:], *[capacity] * leaves]
                levels = [level]
                while len(level) > 1:
                    level = [*map(max, level[::2], level[1::2])]
                    levels.append(level)
                room, leaves = [capacity, *chain.from_iterable(reversed(levels))], 2 * leaves
    sizes = np.bincount(row_of, minlength=rows)
    return PackedRows(np.argsort(row_of, kind="stable"), np.cumsum(sizes))


def fill(rows: Sequence[PackedRow], lengths: Integers, capacity: int) -> float:
    """Share of the rows' capacity that holds tokens, in (0, 1]; 0 without rows."""
    tokens = int(lengths[PackedRows.of(rows).samples].sum())
    return tokens / (len(rows) * capacity) if len(rows) else 0.0


def round_up(size: int, multiple_of: int) -> int:
    """The least multiple of ``multiple_of`` that is no less than ``size``."""
    return -(-size // multiple_of) * multiple_of


def keep_rows(cache: Path, key: object, make: Callable[[], PackedRows]) -> PackedRows:
    """The rows that ``make`` returns, from the cache if they were made before.

    ``key``, JSON-ready, says all that they depend on but this package's code.
    """
    text = json.dumps([key, code_digest()], sort_keys=True)
    directory = cache / f"rows-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def build(directory: Path) -> dict[str, int]:
        rows = make()
        for name in ("samples", "ends"):
            np.save(directory / f"{name}.npy", getattr(rows, name))
        return {"rows": len(rows)}

    try:
        load_or_build(directory, build)
    except (OSError, ValueError):  # of a cache that cannot be written, or of ``make`` itself
        return make()
    return PackedRows(
        *(np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("samples", "ends"))
    )


@dataclass(frozen=True)
class TokenBudget:
    """Size of the micro-batches of a step.

    Without ``row_tokens`` each sample has a row of its own, and padding counts as tokens.
    """

    tokens: int  # most of a micro-batch
    micro_batches: int  # of a step, on all ranks
    row_tokens: int | None  # of a row of several samples, about

    @property
    def groups_per_step(self) -> int:
        """Number of :meth:`groups` that a step takes."""
        return self.micro_batches if self.row_tokens is not None else 1

    def groups(self, counts: SampleCounts, *, seed: int) -> PackedRows:
        """Samples in groups that are made once a run: epochs permute the groups.

        A group fills a micro-batch. Where padding counts it fills a whole step, as the samples of
        a step are sorted. No sample may exceed the budget.
        """
        if self.row_tokens is not None:
            return make_rows(counts.tokens, max_seq_len=self.tokens, packing=True, seed=seed)
        order = permutation(len(counts.tokens), "packing", seed)
        positions = counts.positions[order]
        before = np.concatenate([[0], np.cumsum(positions)])
        groups, start = [], 0

        def is_too_much(end: int) -> bool:
            lengths = np.sort(positions[start:end])[::-1]
            return len(_cut(lengths, self.tokens)) > self.micro_batches

        while start < len(order):
            room = before[start] + self.micro_batches * self.tokens
            most = int(np.searchsorted(before, room, side="right"))
            end = bisect_left(range(most), True, lo=start + 1, key=is_too_much) - 1
            groups.append(tuple(order[start:end].tolist()))
            start = end
        return PackedRows.of(groups)

    def fill(self, groups: Sequence[PackedRow], counts: SampleCounts) -> float:
        """Share of the budget that holds tokens, in (0, 1]; 0 without groups."""
        micro_batches = self.micro_batches // self.groups_per_step
        return fill(groups, counts.tokens, micro_batches * self.tokens)

    def assign_to_ranks(
        self, groups: Sequence[PackedRow], counts: SampleCounts, *, world_size: int
    ) -> list[list[PackedRow]]:
        """The samples of a step's groups as rows of micro-batches of sizes as equal as possible.

        The rows of every rank's first micro-batch come first, then those of the second ones, and
        so on, the larger first. Some have none where there is too little for all ranks. A row of
        several samples may be a little longer than ``row_tokens``, which costs less than one more.
        """
        samples = [index for group in groups for index in group]
        samples.sort(key=lambda index: (-counts.positions[index], index))
        if self.row_tokens is None:
            lengths = counts.positions[np.array(samples)]
            return [
                [(index,) for index in samples[batch]]
                for batch in cut_evenly(lengths, self.tokens, multiple_of=world_size)
            ]
        size = round_up(len(groups), world_size)
        shares = _spread(samples, counts.tokens, size, self.tokens)
        if shares is None:  # groups are nearly full: not every other order fits
            shares = [*groups, *[()] * (size - len(groups))]
        totals = [int(counts.tokens[list(share)].sum()) for share in shares]
        batches = []
        for total, share in sorted(zip(totals, shares, strict=True), key=lambda each: -each[0]):
            rows = _spread(share, counts.tokens, -(-total // self.row_tokens), total)
            assert rows is not None
            batches.append(rows)
        return batches


def cut_evenly(lengths: Integers, limit: int, *, multiple_of: int) -> list[slice]:
    """Slices of samples for the fewest batches, of sizes as equal as possible.

    ``lengths`` are (n,), n >= 1, the longest first and none longer than ``limit``, the positions
    of a batch with padding. The number of batches is a multiple of ``multiple_of``; the last of
    them may be empty.
    """
    size = round_up(len(_cut(lengths, limit)), multiple_of)
    least = bisect_left(
        range(limit), True, lo=int(lengths[0]), key=lambda limit: len(_cut(lengths, limit)) <= size
    )
    ends = _cut(lengths, least)
    ends += [len(lengths)] * (size - len(ends))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _spread(
    samples: Sequence[int], tokens: Integers, parts: int, capacity: int
) -> list[PackedRow] | None:
    """Samples in ``parts`` parts of similar tokens; None if one would exceed ``capacity``.

    The longest first, each to the part that has the least (LPT; R. L. Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, number) for number in range(parts)]
    for index in sorted(samples, key=lambda index: (-tokens[index], index)):
        load, number = loads[0]
        load += int(tokens[index])
        if load > capacity:
            return None
        heapq.heapreplace(loads, (load, number))
        shares[number].append(index)
    return [tuple(share) for share in shares]


def _cut(lengths: Integers, limit: int) -> list[int]:
    """Ends of the fewest batches of up to ``limit`` positions, of samples sorted longest first."""
    ends, start = [], 0
    while start < len(lengths):
        start = min(start + limit // int(lengths[start]), len(lengths))
        ends.append(start)
    return ends


class Collator(Protocol):
    """Makes batches; see :class:`dschat_lora.data.batch.SampleCollator`."""

    def __call__(self, rows: Sequence[Sequence[Any]]) -> object:
        """One batch of rows of samples."""

    def empty(self) -> object:
        """A batch of padding alone: a rank without rows still takes part in the forward pass."""

    def positions(self, samples: TokenSet) -> Integers:
        """(len(samples),) positions of a row for each sample alone: ``counts``' own."""

    def counts(self, samples: TokenSet) -> SampleCounts:
        """Counts of each sample in the rows of these batches."""

    def shape(self, lengths: Sequence[int]) -> tuple[int, int]:
        """(B, T) of the batch of n >= 1 rows of these lengths."""


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step."""

    batches: Sequence[Any]  # this rank's
    counts: dict[str, int]  # of all ranks, by the names of ``StepCounts``
    metrics: dict[str, float] = field(default_factory=dict)  # further ones, of the data
    source_targets: dict[str, int] = field(default_factory=dict)  # of all ranks, by source

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class SampleSources(NamedTuple):
    """Which source each sample is of."""

    names: Sequence[str]
    numbers: Integers  # (n,) of samples, into ``names``
    times: Sequence[float] = ()  # that rows of each source are used per epoch, if that is known


def told_sources(config: "DataConfig", data: "Prepared") -> tuple[str, ...]:
    """Names of the training sources where metrics tell them apart; else none."""
    names = tuple(data.train_sources) if config.is_mixture else ()
    if config.tail is not None:
        names = data.names[: len(config.data_path) + len(config.sft_only_data_path)]
    return names if len(names) > 1 else ()


def sample_sources(data: "Prepared", names: Sequence[str]) -> SampleSources:
    """The source of each training sample, of these; -1 where it is another."""
    places = {name: number for number, name in enumerate(names)}
    own = [places.get(name, -1) for name in data.train_sources]
    numbers = np.repeat(own, list(data.train_sources.values()))
    return SampleSources(names, numbers, [data.times[name] for name in names])


class Loader(Protocol):
    """The micro-batches of a run's optimizer steps."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a pass; those of the run where the length of the data is not known."""

    @property
    def has_ended(self) -> bool:
        """Whether the step that was taken last is the last one that the data gives."""

    def steps(self, start: int) -> Iterator[Window]:
        """This rank's micro-batches of each step from ``start`` on, until the data ends.

        Raises:
            StreamError: where the data cannot be read on.
        """

    def state(self) -> dict[str, Any]:
        """That after the step that was taken last; empty where its number says all."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""


class Tail(Protocol):
    """What reads training sources on behind their first rows, which alone are prepared.

    An add-on's options have ``config.data.tail`` be one, in their ``before_data``. ``setup`` is
    that of the run; methods with one are called on every rank.
    """

    @property
    def about(self) -> str:
        """What the rows of steps are, for a dry run."""

    @property
    def at_once(self) -> tuple[int, str]:
        """Rows that may stand in for each other at a time, and what to do to have more."""

    def hub_rows(self, source: Any) -> Iterable[Any]:
        """Rows of a hub data set, read as they are asked for."""

    def identity(self, *data: "DataConfig | None") -> str:
        """What is read, for the identity of a run's state."""

    def loader(self, setup: Any, layout: Any) -> Loader:
        """Steps of a supervised stage."""

    def text_loader(self, setup: Any, data: "DataConfig", head: "Prepared", **how: Any) -> Loader:
        """Steps of pretraining text that goes with responses."""

    def source(self, setup: Any, data: "DataConfig", head: "Prepared", **how: Any) -> Any:
        """Samples of each iteration of step 3; see :class:`dschat_lora.rl.draw.source.Source`."""

    def record(self, run: Any, state: dict[str, Any], *, has_ended: bool, step: int) -> None:
        """Record what was read, by the state of a loader or source."""


class StepLoader:
    """``epoch(n)`` yields, for every optimizer step of epoch ``n``, this rank's micro-batches.

    Which rows step ``k`` trains on depends on the seed, ``n``, ``k`` and the product of micro
    batch, accumulation and ranks alone, so a resumed run, or one of another shape, sees what
    it would have seen. No row is dropped: the last step of an epoch takes what is left, with
    empty batches on ranks that have none.

    Every rank assigns the rows of all ranks, and so knows their counts without communication.
    """

    has_ended = False  # epoch comes after epoch

    def __init__(
        self,
        samples: Samples,
        *,
        rows: Sequence[PackedRow],
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world_size: int,
        seed: int,
        collate: Collator,
        counts: SampleCounts | None = None,
        budget: TokenBudget | None = None,
        sources: SampleSources | None = None,
    ) -> None:
        """Count the samples, unless ``counts`` of every one are given.

        With ``sources``, windows have the samples and tokens of each among their metrics.

        With a ``budget``, ``rows`` are :meth:`TokenBudget.groups`, ``micro_batch_size`` is 1 and
        ``rows_per_step`` the micro-batches of a step on all ranks.
        """
        assert 0 <= rank < world_size
        assert min(micro_batch_size, gradient_accumulation_steps) >= 1
        rows = PackedRows.of(rows)
        if counts is None:
            size, stored = 1 + int(rows.samples.max(initial=-1)), samples
            if not isinstance(stored, TokenSet):
                stored = TokenSet.of([samples[index] for index in range(size)])
            counts = collate.counts(stored)
        self.counts, self.num_rows = counts, len(rows)
        tells: int = getattr(collate, "num_sources", 0)  # that of pairs has none
        if sources is not None and tells:
            samples = SourcedSamples(samples, sources.numbers)
        self._samples, self._rows, self._collate, self._budget = samples, rows, collate, budget
        self._micro_batch_size, self._seed, self._sources = micro_batch_size, seed, sources
        self._rank, self._world_size = rank, world_size
        self.rows_per_step = micro_batch_size * gradient_accumulation_steps * world_size
        self._taken = self.rows_per_step
        self.packs = bool((np.diff(rows.ends, prepend=0) > 1).any())  # several samples a row
        if budget is not None:
            assert (micro_batch_size, budget.micro_batches) == (1, self.rows_per_step)
            self._taken, self.packs = budget.groups_per_step, budget.row_tokens is not None
        self.steps_per_epoch = -(-len(rows) // self._taken)

    def epoch(self, number: int, start_step: int = 0) -> Iterator[Window]:
        """This rank's micro-batches of each step, from ``start_step`` on.

        Every rank gets the same number of micro-batches at a step.
        """
        order = permutation(len(self._rows), "epoch", self._seed, number)
        for step in range(start_step, self.steps_per_epoch):
            first = step * self._taken
            window = self.window([self._rows[i] for i in order[first : first + self._taken]])
            if self._sources is not None:
                done = number + (step + 1) / self.steps_per_epoch
                passes = zip(self._sources.names, self._sources.times, strict=True)
                window.metrics.update({f"epochs/{n}": done * times for n, times in passes})
            yield window

    def steps(self, start: int) -> Iterator[Window]:
        """:meth:`epoch` after epoch, without end, from step ``start`` of all on."""
        epoch, first = divmod(start, self.steps_per_epoch)
        for number in count(epoch):
            yield from self.epoch(number, first)
            first = 0

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state

    def window(self, rows: list[PackedRow]) -> Window:
        """This rank's micro-batches of the step that these rows are."""
        batches = self._micro_batches(rows)
        own = batches[self._rank :: self._world_size]
        metrics: dict[str, float] = {}
        targets: dict[str, int] = {}
        if self._sources is not None:
            samples = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
            numbers = self._sources.numbers[samples]
            for number, name in enumerate(self._sources.names):
                of_source = samples[numbers == number]
                metrics[f"samples/{name}"] = len(of_source)
                metrics[f"tokens/{name}"] = int(self.counts.tokens[of_source].sum())
                targets[name] = int(self.counts.targets[of_source].sum())
        return Window(
            [_collated(self._samples, batch, self._collate) for batch in own],
            self._count(batches),
            metrics,
            targets,
        )

    def _micro_batches(self, rows: list[PackedRow]) -> list[list[PackedRow]]:
        """Rows of each micro-batch of each rank, those of all ranks' first ones first."""
        if self._budget is not None:
            return self._budget.assign_to_ranks(rows, self.counts, world_size=self._world_size)
        # Rows of similar length share a micro-batch: little padding, and ranks wait little for
        # each other. Within a step the order has no effect on the gradient's sum.
        order = np.argsort(-self._row_lengths(rows), kind="stable")
        rows = [rows[index] for index in order]
        return assign_to_ranks(rows, batch_size=self._micro_batch_size, world_size=self._world_size)

    def _row_lengths(self, rows: Sequence[PackedRow]) -> Integers:
        """(len(rows),) positions of each row."""
        ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
        samples = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        up_to = np.concatenate([[0], np.cumsum(self.counts.positions[samples])])
        return np.diff(up_to[ends], prepend=0)

    def _count(self, batches: Sequence[Sequence[PackedRow]]) -> dict[str, int]:
        """Counts of a step's batches on all ranks, which are not made, by ``StepCounts``' names."""
        counts, rows = self.counts, list(chain.from_iterable(batches))
        samples = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        lengths = iter(self._row_lengths(rows).tolist())
        shapes = [
            self._collate.shape(list(islice(lengths, len(each)))) if each else (1, 1)
            for each in batches
        ]
        return {
            "num_samples": len(samples),
            "num_tokens": int(counts.tokens[samples].sum()),
            "num_targets": int(counts.targets[samples].sum()),
            "num_attended": int(counts.attended[samples].sum()),
            "num_positions": sum(height * width for height, width in shapes),
            "num_scored_pairs": sum(height * width**2 for height, width in shapes),
            "num_chosen_targets": int(counts.chosen_targets[samples].sum()),
        }


def eval_batches(
    samples: Samples,
    *,
    rows: Sequence[PackedRow],
    batch_size: int,
    rank: int,
    world_size: int,
    collate: Collator,
) -> Iterator[Any]:
    """This rank's batches of an evaluation, each row on exactly one rank.

    Every rank gets the same number of batches, through empty ones where rows run out.
    """
    batches = assign_to_ranks(rows, batch_size=batch_size, world_size=world_size)
    for batch in batches[rank::world_size]:
        yield _collated(samples, batch, collate)


def assign_to_ranks(
    rows: Sequence[PackedRow], *, batch_size: int, world_size: int
) -> list[list[PackedRow]]:
    """Rows assigned to ranks round-robin, up to ``batch_size`` a rank and batch.

    The rows of every rank's first batch come first, then those of the second ones, and so on.
    """
    per_batch = batch_size * world_size
    turns = [rows[first : first + per_batch] for first in range(0, len(rows), per_batch)]
    return [list(turn[rank::world_size]) for turn in turns for rank in range(world_size)]


def _collated(samples: Samples, rows: Sequence[PackedRow], collate: Collator) -> object:
    if not rows:
        return collate.empty()
    return collate([[samples[index] for index in row] for row in rows])
