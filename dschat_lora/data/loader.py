"""The micro-batches of each optimizer step for one rank."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.packing import Integers, PackedRow, PackedRows, SampleCounts, TokenBudget
from dschat_lora.data.samples import Samples, SourcedSamples, TokenSet

if TYPE_CHECKING:
    from dschat_lora.config.data import DataConfig
    from dschat_lora.data.prepare import Prepared
    from dschat_lora.data.sources import DataSource


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


def sources_in_metrics(config: "DataConfig", data: "Prepared") -> tuple[str, ...]:
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

    @property
    def counts(self) -> SampleCounts | None:
        """Of every sample of a pass; None where the length of the data is not known."""

    @property
    def num_rows(self) -> int:
        """Rows of a pass, 0 likewise."""

    @property
    def packs(self) -> bool:
        """Whether rows are known to hold several samples."""

    @property
    def reads_ahead(self) -> bool:
        """Whether a thread of its own has the next steps, and its state is that of the last one."""

    def steps(self, start: int) -> Iterator[Window]:
        """This rank's micro-batches of each step from ``start`` on, until the data ends.

        Raises:
            StreamError: where the data cannot be read on.
        """

    def state(self) -> dict[str, Any]:
        """That after the step that was taken last; empty where its number says all."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""

    def identity(self) -> dict[str, Any]:
        """What is read and how, for the identity of a run's state."""

    def record(self, run: Any, step: int) -> None:
        """Record what was read in so many steps, where that shows only then."""


class Tail(Protocol):
    """What reads training sources on behind their first rows, which alone are prepared.

    An add-on's options have ``config.data.tail`` be one, in their ``before_data``. ``setup`` is
    that of the run; methods with one are called on every rank.
    """

    @property
    def at_once(self) -> tuple[int, str]:
        """Rows that may stand in for each other at a time, and what to do to have more."""

    def hub_rows(self, source: "DataSource") -> Iterable[Mapping[str, object]]:
        """Rows of a hub data set, read as they are asked for."""

    def loader(self, setup: object, layout: object) -> Loader:
        """Steps of a supervised stage."""

    def text_loader(
        self, setup: object, data: "DataConfig", head: "Prepared", **how: object
    ) -> Loader:
        """Steps of pretraining text that goes with responses."""

    def source(self, setup: object, data: "DataConfig", head: "Prepared", **how: object) -> Any:
        """Samples of each iteration of step 3; see :class:`dschat_lora.rl.draw.source.Source`."""


class StepLoader:
    """``epoch(n)`` yields, for every optimizer step of epoch ``n``, this rank's micro-batches.

    Which rows step ``k`` trains on depends on the seed, ``n``, ``k`` and the product of micro
    batch, accumulation and ranks alone, so a resumed run, or one of another shape, sees what
    it would have seen. No row is dropped: the last step of an epoch takes what is left, with
    empty batches on ranks that have none.

    Every rank assigns the rows of all ranks, and so knows their counts without communication.
    """

    has_ended = reads_ahead = False  # epoch comes after epoch

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
        # Batches of pairs do not say of which source a target is.
        tells: int = getattr(collate, "num_sources", 0)
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

    def identity(self) -> dict[str, Any]:
        return {"packing": self.packs, "rows": self.num_rows}

    def record(self, run: object, step: int) -> None:
        pass

    def window(self, rows: list[PackedRow]) -> Window:
        """This rank's micro-batches of the step that these rows are."""
        if self._budget is not None:
            batches = self._budget.assign_to_ranks(rows, self.counts, world_size=self._world_size)
        else:
            # Rows of similar length share a micro-batch: little padding, and ranks wait little for
            # each other. Within a step the order has no effect on the gradient's sum.
            order = np.argsort(-self._row_lengths(rows), kind="stable")
            batches = assign_to_ranks(
                [rows[index] for index in order],
                batch_size=self._micro_batch_size,
                world_size=self._world_size,
            )
        own = batches[self._rank :: self._world_size]
        metrics: dict[str, float] = {}
        targets: dict[str, int] = {}
        if self._sources is not None:
            samples = PackedRows.of(rows).samples
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

    def _row_lengths(self, rows: Sequence[PackedRow]) -> Integers:
        """(len(rows),) positions of each row."""
        packed = PackedRows.of(rows)
        up_to = np.concatenate([[0], np.cumsum(self.counts.positions[packed.samples])])
        return np.diff(up_to[packed.ends], prepend=0)

    def _count(self, batches: Sequence[Sequence[PackedRow]]) -> dict[str, int]:
        """Counts of a step's batches on all ranks, which are not made, by ``StepCounts``' names."""
        counts, rows = self.counts, PackedRows.of(chain.from_iterable(batches))
        samples, lengths = rows.samples, iter(self._row_lengths(rows).tolist())
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
