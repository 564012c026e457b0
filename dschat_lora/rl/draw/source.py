"""Prompts of each iteration, and answers of the data: in an order of all of them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.samples import PromptSample, SourcedSamples
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.rl.options.config import RlhfConfig, RolloutConfig
from dschat_lora.rl.response.response import Response
from dschat_lora.runtime.run import OpenRun

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

    def identity(self) -> dict[str, Any]:
        """What is read and how, for the identity of a run's state."""

    def record(self, run: OpenRun[RlhfConfig], step: int) -> None:
        """Record what was read in so many steps, where that shows only then."""


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
        sizes = Counter({self.size(0): iteration - epochs})
        sizes[self.size(self.iterations_per_epoch - 1)] += epochs
        return sizes

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

    def identity(self) -> dict[str, Any]:
        return {}

    def record(self, run: object, step: int) -> None:
        pass


@dataclass(frozen=True)
class Draws:
    """What is drawn for an iteration."""

    prompts: Sequence[PromptSample]
    further: Iterator[PromptSample]  # those to ask next, each once
    answers: Sequence[Response] = ()  # of data, which are learnt from beside those drawn


def prompts_per_iteration(batch: RolloutConfig) -> int:
    """Prompts of an iteration over all processes."""
    return batch.responses * data_world_size() // batch.num_generations
