"""How long a run of step 3 is, and how far it has come."""

from dataclasses import dataclass, field
from typing import Any

from dschat_lora.engine.distributed import data_world_size
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.rollout import PromptOrder
from dschat_lora.rl.throughput import PHASES
from dschat_lora.runtime.loop import Progress


@dataclass(frozen=True)
class RlhfSchedule:
    """How long a run is: iterations, each of some optimizer steps; and how often it evaluates."""

    order: PromptOrder
    num_generations: int
    rows_per_step: int
    ppo_epochs: int
    num_epochs: int
    max_steps: int
    eval_interval: int = 0

    def steps_of(self, iteration: int) -> int:
        """Optimizer steps of an iteration, if nothing ends it early."""
        responses = self.order.size(iteration) * self.num_generations
        return self.ppo_epochs * -(-responses // self.rows_per_step)

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations of a pass over the prompts."""
        return self.order.iterations_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the prompts."""
        last = self.iterations_per_epoch - 1
        return self.steps_of(0) * last + self.steps_of(last)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        total = self.num_epochs * self.steps_per_epoch
        return self.max_steps if self.max_steps and total else total

    def steps_before(self, iteration: int) -> int:
        """Optimizer steps planned before an iteration."""
        epoch, number = divmod(iteration, self.iterations_per_epoch)
        return epoch * self.steps_per_epoch + number * self.steps_of(0)

    @property
    def num_iterations(self) -> int:
        """Iterations of the run."""
        if not self.num_steps:
            return 0
        epochs, rest = divmod(self.num_steps, self.steps_per_epoch)
        within = min(-(-rest // self.steps_of(0)), self.iterations_per_epoch)
        return epochs * self.iterations_per_epoch + within


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

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        # What is not finite went through JSON as text.
        self.kl_coef, self.kl_spent = float(self.kl_coef), float(self.kl_spent)
        self.moments = {name: float(value) for name, value in self.moments.items()}


def make_rlhf_schedule(config: RlhfConfig, num_prompts: int) -> RlhfSchedule:
    """The schedule of a run over so many prompts."""
    batch, world = config.batch, data_world_size()
    responses = batch.per_device_generation_batch_size * batch.generation_batches * world
    return RlhfSchedule(
        order=PromptOrder(num_prompts, responses // batch.num_generations, config.run.seed),
        num_generations=batch.num_generations,
        rows_per_step=batch.per_device_training_batch_size
        * batch.gradient_accumulation_steps
        * world,
        ppo_epochs=config.ppo.ppo_epochs,
        num_epochs=config.optim.num_train_epochs,
        max_steps=config.optim.max_steps,
        eval_interval=config.run.eval_interval,
    )
