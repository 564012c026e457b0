"""Prompts of each iteration, and answers of the data: in an order of all, or from a stream."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.loader import PackedRow
from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import PromptSample, SequenceSample, SourcedSamples
from dschat_lora.data.stream import Block as StreamBlock
from dschat_lora.data.stream_loader import Blocks, StreamedRows, Taken, block_seed
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.rl.options.config import RlhfConfig, RolloutConfig

Pool = SourcedSamples | Sequence[Any]


@dataclass(frozen=True)
class Block(Sequence[Any]):
    """The samples of an iteration, by their numbers in a pool of those that may replace them."""

    pool: Pool
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return self.pool[self.numbers[index]]

    def others(self, *key: int | str) -> Iterator[Any]:
        """The rest of the pool in a random order, of which ``key`` is the seed."""
        own = set(self.numbers)
        for number in map(int, permutation(len(self.pool), *key)):
            if number not in own:
                yield self.pool[number]


class Source(Protocol):
    """The samples of each iteration; call methods on every rank."""

    @property
    def per_iteration(self) -> int:
        """Samples of an iteration at whose end no pass over the data ends."""

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations of a pass; as many as the run may have where its length is not known."""

    @property
    def end(self) -> int | None:
        """The number of iterations that the data gives, once that is known to be bounded."""

    def size(self, iteration: int) -> int:
        """How many samples an iteration has, as far as is known."""

    def sizes(self, iteration: int) -> Mapping[int, int]:
        """How many of the iterations before one have so many samples, as far as is known."""

    def passes(self, iteration: int) -> dict[str, float]:
        """Passes over the data before an iteration, as metrics; of a mixture over each source."""

    def block(self, iteration: int) -> Block:
        """The samples of an iteration.

        Raises:
            StreamError: if they cannot be read.
        """

    def state(self) -> dict[str, Any]:
        """That before the iteration that is next; empty where its number says all."""

    def restore(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""


@dataclass(frozen=True)
class PromptOrder:
    """A random order of all prompts for each epoch; an iteration's are its next ones.

    ``samples`` are the prompts, where blocks are asked for, and ``times`` how often a pass has the
    rows of each source of a mixture.
    """

    num_prompts: int
    per_iteration: int
    seed: int
    samples: Pool = ()
    times: Mapping[str, float] = field(default_factory=dict)
    end = None

    @cached_property
    def iterations_per_epoch(self) -> int:
        """The last one of an epoch may have fewer prompts."""
        return -(-self.num_prompts // self.per_iteration)

    def passes(self, iteration: int) -> dict[str, float]:
        """Passes over the prompts before an iteration, as metrics."""
        epoch = iteration / max(1, self.iterations_per_epoch)
        return {"epoch": epoch} | {f"epochs/{k}": epoch * v for k, v in self.times.items()}

    def size(self, iteration: int) -> int:
        """How many prompts an iteration has."""
        number = iteration % self.iterations_per_epoch
        return min(self.per_iteration, self.num_prompts - number * self.per_iteration)

    def sizes(self, iteration: int) -> Mapping[int, int]:
        """How many of the iterations before one have so many prompts."""
        epochs = iteration // self.iterations_per_epoch
        found = Counter({self.size(0): iteration - epochs})
        found[self.size(self.iterations_per_epoch - 1)] += epochs
        return found

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts of an iteration, counted from 0."""
        epoch, number = divmod(iteration, self.iterations_per_epoch)
        order = permutation(self.num_prompts, "prompts", self.seed, epoch)
        first = number * self.per_iteration
        return [int(n) for n in order[first : first + self.per_iteration]]

    def block(self, iteration: int) -> Block:
        return Block(self.samples, self(iteration))

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        assert not state


class PromptStream(StreamedRows):
    """The samples of each iteration from a stream.

    Iterations are asked for in turn. That a pass over the data ends in one, which is shorter then,
    shows when it is read. Where a block of the stream holds all of the data, they are those of
    the data that is prepared.
    """

    def __init__(
        self,
        stream: Blocks,
        *,
        per_iteration: int,
        most: int,
        kind: DataKind = "prompts",
        seed: int,
        iteration: Callable[[], int],
        say: Callable[[str], object],
    ) -> None:
        """Nothing is read yet.

        ``most`` bounds the iterations of the run; ``iteration`` is the one that is next.
        """
        super().__init__(stream, taken=per_iteration, kind=kind, say=say)
        self.per_iteration, self._seed, self._iteration = per_iteration, seed, iteration
        self.iterations_per_epoch = most  # as the length of a pass is not known
        self._state.update({"iteration": 0, "short": {}, "passes": {}, "end": None})
        self._read: dict[int, tuple[dict[str, Any], Block]] = {}  # with the state before each
        self._taking: Iterator[Taken] | None = None

    def rows_of(self, block: StreamBlock) -> Sequence[PackedRow]:
        seed = block_seed(block, self._seed)
        order = permutation(len(block.samples), "prompts", seed, block.start["epoch"])
        return [(int(number),) for number in order]

    def state(self) -> dict[str, Any]:
        """That before the iteration that is next, however many were read ahead."""
        return self._before(self._iteration())

    def restore(self, state: dict[str, Any]) -> None:
        short = {int(number): size for number, size in state["short"].items()}
        super().restore({**state, "short": short, "end": state.get("end")})

    @property
    def end(self) -> int | None:
        found: int | None = self._state["end"]
        return found

    def size(self, iteration: int) -> int:
        return int(self._state["short"].get(iteration, self.per_iteration))

    def sizes(self, iteration: int) -> Mapping[int, int]:
        found = Counter(size for n, size in self._state["short"].items() if n < iteration)
        found[self.per_iteration] += iteration - found.total()
        return found

    def passes(self, iteration: int) -> dict[str, float]:
        found: dict[str, float] = self._before(iteration)["passes"]
        by_name = {f"epochs/{name}": value for name, value in found.items()}
        return {"epoch": min(found.values(), default=0.0), **(by_name if len(found) > 1 else {})}

    def _before(self, iteration: int) -> dict[str, Any]:
        return self._read[iteration][0] if iteration in self._read else self._state

    def block(self, iteration: int) -> Block:
        """The samples of an iteration, in a pool of those of its last block in the stream.

        Those that it has of earlier ones stand at its head.
        """
        if self._taking is None:
            self._taking = self.take()
        while (number := self._state["iteration"]) <= iteration:
            before = self._state
            members, passes = next(self._taking)
            last = members[-1][0]
            earlier: list[PromptSample | SequenceSample] = [
                block.sourced[index] for block, (index,) in members if block is not last
            ]
            own = [len(earlier) + index for block, (index,) in members if block is last]
            pool: Pool = last.sourced
            if earlier:
                pool = [*earlier, *(last.sourced[index] for index in range(len(last.sourced)))]
            self._read[number] = before, Block(pool, [*range(len(earlier)), *own])
            short = {**before["short"]}
            if len(members) < self.per_iteration:
                short[number] = len(members)
            new = {"iteration": number + 1, "short": short, "passes": passes}
            end = number + 1 if self.has_ended else None
            self._state = {**self._state, **new, "end": end}
        self._read = {n: read for n, read in self._read.items() if n >= self._iteration()}
        return self._read[iteration][1]


@dataclass(frozen=True)
class Draws:
    """What is drawn for an iteration."""

    prompts: Sequence[PromptSample]  # whose responses are begun, those of the iteration first
    needed: int | None  # how many of them are enough; None: all are needed
    further: Iterator[PromptSample]  # those to ask next, each once
    answers: Sequence[SequenceSample] = ()  # of the data, which are learnt from beside responses


def prompts_per_iteration(batch: RolloutConfig) -> int:
    """Prompts of an iteration over all processes."""
    responses = batch.per_device_generation_batch_size * batch.generation_batches
    return responses * data_world_size() // batch.num_generations


def check_others(config: RlhfConfig, num_prompts: int) -> None:
    """Refuse over-sampling of data, or of blocks of a stream, that are one iteration.

    Raises:
        ValueError: naming ``--oversample``.
    """
    batch, known, remedy = config.batch, num_prompts, "give more prompts"
    if config.data.streaming:
        known, remedy = config.data.shuffle_buffer_size, "give a larger --shuffle_buffer_size"
    if batch.oversample > 1 and known <= prompts_per_iteration(batch):
        raise ValueError(
            f"--oversample {batch.oversample:g} begins further prompts than the {known} of an "
            f"iteration, and there are no others: {remedy}, or fewer --generation_batches"
        )
