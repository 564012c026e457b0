"""Prompts of each iteration, and answers of the data, from a stream."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dschat_lora.addons.streaming.loader import (
    Blocks,
    StreamBlock,
    StreamedRows,
    Taken,
    block_seed,
)
from dschat_lora.algos.seeds import permutation
from dschat_lora.data.packing import PackedRow
from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import PromptSample, SequenceSample
from dschat_lora.rl.draw.source import Block, Pool


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
        sources: str = "",
    ) -> None:
        """Nothing is read yet.

        ``most`` bounds the iterations of the run; ``iteration`` is the one that is next.
        """
        super().__init__(stream, taken=per_iteration, kind=kind, say=say, sources=sources)
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
        end: int | None = self._state["end"]
        return end

    def size(self, iteration: int) -> int:
        return int(self._state["short"].get(iteration, self.per_iteration))

    def sizes(self, iteration: int) -> Mapping[int, int]:
        sizes = Counter(size for n, size in self._state["short"].items() if n < iteration)
        sizes[self.per_iteration] += iteration - sizes.total()
        return sizes

    def passes(self, iteration: int) -> dict[str, float]:
        passes: dict[str, float] = self._before(iteration)["passes"]
        by_name = {f"epochs/{name}": value for name, value in passes.items()}
        return {"epoch": min(passes.values(), default=0.0), **(by_name if len(passes) > 1 else {})}

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
