"""The order of prompts."""

from dataclasses import dataclass

from dschat_lora.algos.seeds import permutation


@dataclass(frozen=True)
class PromptOrder:
    """Prompts of each iteration: a random order of all of them, epoch after epoch."""

    num_prompts: int
    per_iteration: int
    seed: int

    @property
    def iterations_per_epoch(self) -> int:
        """The last one of an epoch may have fewer prompts."""
        return -(-self.num_prompts // self.per_iteration)

    def passes(self, iteration: int) -> dict[str, float]:
        """Passes over the prompts before an iteration, as a metric."""
        return {"epoch": iteration / max(1, self.iterations_per_epoch)}

    def size(self, iteration: int) -> int:
        """How many prompts an iteration has."""
        number = iteration % self.iterations_per_epoch
        return min(self.per_iteration, self.num_prompts - number * self.per_iteration)

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts of an iteration, counted from 0."""
        epoch, number = divmod(iteration, self.iterations_per_epoch)
        order = permutation(self.num_prompts, "prompts", self.seed, epoch)
        first = number * self.per_iteration
        return [int(n) for n in order[first : first + self.per_iteration]]
