"""Prompts of step 3, and answers of the data, that are read while training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.algos.seeds import permutation
from dschat_lora.data.loader import PackedRow
from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import PromptSample, SourcedSamples
from dschat_lora.data.stream import Block
from dschat_lora.data.stream_loader import Blocks, StreamedRows, Taken, block_seed

Pool = SourcedSamples | Sequence[Any]


@dataclass(frozen=True)
class _Iteration:
    before: dict[str, Any]  # the stream's state
    numbers: list[int]  # of its prompts, in the pool
    pool: Pool  # those of its last block, behind what it has of earlier ones


class PromptStream(StreamedRows):
    """The prompts of each iteration from a stream, in the place of a ``PromptOrder`` of all.

    Iterations are asked in turn, by every rank. That a pass over the data ends in one, which is
    shorter then, shows when it is read. Where a block holds all of the data, they are those of the
    data that is prepared.
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
        self._read: dict[int, _Iteration] = {}
        self._taking: Iterator[Taken] | None = None

    def rows_of(self, block: Block) -> Sequence[PackedRow]:
        seed = block_seed(block, self._seed)
        order = permutation(len(block.samples), "prompts", seed, block.start["epoch"])
        return [(int(number),) for number in order]

    def state(self) -> dict[str, Any]:
        """That before the iteration that is next, however many were read ahead."""
        return self._before(self._iteration())

    def restore(self, state: dict[str, Any]) -> None:
        short = {int(number): size for number, size in state["short"].items()}
        super().restore({**state, "short": short, "end": state.get("end")})

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts of an iteration, in its :meth:`pool`."""
        return self._get(iteration).numbers

    def pool(self, iteration: int) -> Pool:
        """Prompts of an iteration, and those that may come in their place."""
        return self._get(iteration).pool

    @property
    def short(self) -> Mapping[int, int]:
        """The number of prompts of iterations that end a pass, as far as was read."""
        found: Mapping[int, int] = self._state["short"]
        return found

    @property
    def end(self) -> int | None:
        """The number of iterations that the data gives, once its end was read."""
        found: int | None = self._state["end"]
        return found

    def size(self, iteration: int) -> int:
        """How many prompts an iteration has."""
        return self.short.get(iteration, self.per_iteration)

    def passes(self, iteration: int) -> dict[str, float]:
        """Passes over the data before an iteration, as metrics; of a mixture over each source."""
        found: dict[str, float] = self._before(iteration)["passes"]
        by_name = {f"epochs/{name}": value for name, value in found.items()}
        return {"epoch": min(found.values(), default=0.0), **(by_name if len(found) > 1 else {})}

    def _before(self, iteration: int) -> dict[str, Any]:
        return self._read[iteration].before if iteration in self._read else self._state

    def _get(self, iteration: int) -> _Iteration:
        if self._taking is None:
            self._taking = self.take()
        while (number := self._state["iteration"]) <= iteration:
            before = self._state
            members, passes = next(self._taking)
            last = members[-1][0]
            earlier: list[PromptSample] = [
                block.sourced[index] for block, (index,) in members if block is not last
            ]
            own = [len(earlier) + index for block, (index,) in members if block is last]
            pool: Pool = last.sourced
            if earlier:
                pool = [*earlier, *(last.sourced[index] for index in range(len(last.sourced)))]
            self._read[number] = _Iteration(before, [*range(len(earlier)), *own], pool)
            short = {**self.short}
            if len(members) < self.per_iteration:
                short[number] = len(members)
            new = {"iteration": number + 1, "short": short, "passes": passes}
            end = number + 1 if self.has_ended else None
            self._state = {**self._state, **new, "end": end}
        # The last one is asked for once more when it is over.
        self._read = {n: read for n, read in self._read.items() if n >= self._iteration() - 1}
        return self._read[iteration]
