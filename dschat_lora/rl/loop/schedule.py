"""The schedule and the progress of a run."""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dschat_lora.engine.distributed import local_rank, rank
from dschat_lora.rl.draw.source import Source
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.score.user_functions import TrainerState
from dschat_lora.rl.watch.throughput import PHASES
from dschat_lora.runtime.loop import Progress


@dataclass(frozen=True)
class RlhfSchedule:
    """How long a run is: iterations, each of some optimizer steps; and how often it evaluates."""

    source: Source
    num_generations: int
    rows_per_step: int
    ppo_epochs: int
    num_epochs: int
    max_steps: int
    eval_interval: int = 0

    def steps_of(self, iteration: int) -> int:
        """Optimizer steps of an iteration, if nothing ends it early."""
        return self._steps_on(self.source.size(iteration))

    def _steps_on(self, prompts: int) -> int:
        return self.ppo_epochs * -(-prompts * self.num_generations // self.rows_per_step)

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations of a pass over the prompts."""
        return self.source.iterations_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the prompts."""
        return self.steps_before(self.iterations_per_epoch)

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        total = self.num_epochs * self.steps_per_epoch
        return self.max_steps if self.max_steps and total else total

    def steps_before(self, iteration: int) -> int:
        """Optimizer steps planned before an iteration."""
        sizes = self.source.sizes(iteration).items()
        return sum(count * self._steps_on(size) for size, count in sizes)

    @property
    def num_iterations(self) -> int:
        """Iterations of the run, as far as is known."""
        steps = self.num_steps
        total = bisect_left(range(steps), steps, key=self.steps_before)
        return total if self.source.end is None else min(total, self.source.end)

    def state(self, progress: "RlhfProgress") -> TrainerState:
        """How far a run is, for reward functions."""
        return TrainerState(
            global_step=progress.step,
            max_steps=self.num_steps,
            epoch=self.source.passes(progress.iteration)["epoch"],
            num_train_epochs=self.num_epochs,
            is_world_process_zero=rank() == 0,
            is_local_process_zero=local_rank() == 0,
        )


@dataclass
class RlhfProgress(Progress):
    """How far a run has come, and the state that adapts on the way; counted over all processes."""

    iteration: int = 0
    responses: int = 0
    tokens: int = 0
    kl_coef: float = 0.0
    kl_start: float = 0.0  # what the user gave for it
    kl_spent: float = 0.0  # latest divergence from the reference, nats per response
    moments: dict[str, float] = field(default_factory=dict)  # of scores
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flops: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def begin_at(self, config: PpoConfig) -> None:
        """Begin with the ``kl_coef`` that the user gives, unless it is that of the run before."""
        if self.kl_start != config.kl_coef:
            self.kl_coef = self.kl_start = config.kl_coef

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        # What is not finite went through JSON as text.
        self.kl_coef, self.kl_spent = float(self.kl_coef), float(self.kl_spent)
        self.moments = {name: float(value) for name, value in self.moments.items()}
