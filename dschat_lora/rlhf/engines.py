"""The engines of a run, and each role's outputs for a batch of responses."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import StepOutcome, TrainEngine
from dschat_lora.rlhf.batch import ResponseBatch
from dschat_lora.rlhf.roles import Network


@dataclass(frozen=True)
class Engines:
    """Actor and critic. Call methods on every rank, in one order: weights may be sharded.

    Attributes:
        actor: over the roles actor and reference, and reward where there is no critic.
        critic: over the roles critic and reward; None where responses are compared instead.
        reward: which of the two has the reward model, if there is one.
        temperature: of all log-probabilities.
    """

    actor: TrainEngine[Network]
    critic: TrainEngine[Network] | None
    reward: TrainEngine[Network] | None
    temperature: float

    @property
    def trained(self) -> Mapping[str, TrainEngine[Network]]:
        """Actor and critic by name."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def eval(self) -> None:
        """Evaluation mode."""
        for engine in self.trained.values():
            engine.eval()

    def train(self) -> None:
        """Training mode: no role has dropout, so this only allows activation checkpointing."""
        for engine in self.trained.values():
            engine.train()

    def set_rates(self, factor: float) -> dict[str, dict[str, float]]:
        """Set the learning rates of both; returns them by role and parameter group."""
        return {name: engine.set_rates(factor) for name, engine in self.trained.items()}

    def step(self) -> dict[str, StepOutcome]:
        """One optimizer step of both, from the gradients so far."""
        queued = {name: engine.queue_step() for name, engine in self.trained.items()}
        return {name: outcome() for name, outcome in queued.items()}

    def policy(self, batch: ResponseBatch, width: int) -> tuple[Tensor, Tensor]:
        """The actor's (n, width) log-probabilities and entropies of response tokens, in nats."""
        return self._policy("actor", batch, width)

    def reference(self, batch: ResponseBatch, width: int) -> Tensor:
        """The reference's (n, width) log-probabilities."""
        return self._policy("reference", batch, width)[0]

    def _policy(self, role: str, batch: ResponseBatch, width: int) -> tuple[Tensor, Tensor]:
        logprobs, entropies = self.actor(
            role,
            *batch.inputs,
            batch.logit_positions,
            batch.target_ids,
            self.temperature,
            batch.spans,
        )
        return batch.table(logprobs, width), batch.table(entropies, width)

    def values(self, batch: ResponseBatch, width: int) -> Tensor:
        """(n, width) values before each response token."""
        assert self.critic is not None
        found = self.critic("critic", *batch.inputs, None, batch.logit_positions, batch.spans)
        return batch.table(found, width)

    def scores(self, batch: ResponseBatch) -> Tensor:
        """(n,) scores of the reward model at the end of each response."""
        assert self.reward is not None
        scores: Tensor = self.reward("reward", *batch.inputs, None, batch.ends, batch.spans)
        return scores

    def text_loss(self, batch: Batch) -> Tensor:
        """Summed loss of the actor on text, in nats."""
        logprobs, _ = self.actor(
            "actor",
            batch.input_ids,
            batch.position_ids,
            batch.segment_ids,
            batch.logit_positions,
            batch.target_ids,
            1.0,
            batch.spans,
        )
        loss: Tensor = -logprobs.sum()
        return loss
