"""The reference of the policy: the actor as it was, or what an add-on gives in its place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dschat_lora.config.data import DataConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.samples import PromptSample
from dschat_lora.models.causal_lm import Policy
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.rl.draw.source import Pool
from dschat_lora.rl.response.batch import ResponseBatch
from dschat_lora.rl.response.response import Response


@dataclass(frozen=True)
class Answers:
    """Answers of data that stand in the place of responses."""

    data: DataConfig
    prepared: Prepared
    share: float  # of the responses that they stand for, in (0, 1]


class Policies(Protocol):
    """What has the actor and the reference of a run."""

    def policy(self, role: str) -> Policy:
        """That of a role, ``actor`` or ``reference``."""


class LossHead(Protocol):
    """A module that gives the losses of tokens by the states of actor and reference."""

    def outputs(
        self, network: Policies, own: ResponseBatch, read: ResponseBatch, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(N,) log-probabilities and entropies of the actor, and losses, which have a gradient.

        The actor reads the batch ``own``, the reference ``read``.
        """


class Reference(Protocol):
    """What reads responses as the reference; methods are called on every rank."""

    def reading(self, responses: Sequence[Response]) -> list[Response]:
        """The responses with the prompts that it reads, where those are not the actor's."""
        return list(responses)

    def begin(self, responses: Sequence[Response]) -> Callable[[], list[list[float]]] | None:
        """What waits for log-probabilities of all tokens, in nats; None: a role gives them."""
        return None

    def head(
        self, actor: PreTrainedModel, reference: PreTrainedModel, *, entropy_trains: bool
    ) -> LossHead | None:
        """What the loss is instead of the algorithm's; None: there is none."""
        return None

    def answers(self, read: Callable[[DataConfig, str, str], Prepared]) -> Answers | None:
        """Answers to learn from too; ``read`` takes data, their name and the refusal of none."""
        return None

    def mixed(
        self, prompts: Sequence[PromptSample], pool: Pool, *, iteration: int
    ) -> tuple[list[PromptSample], list[Response]]:
        """The prompts that the actor answers, and answers of the pool for the others."""
        return list(prompts), []

    def identity(self, fingerprint: str) -> dict[str, str]:
        """What a run's state belongs to, of a reference in memory with this fingerprint."""
        return {}


class ActorAsItWas(Reference):
    """The actor before the run, frozen, which reads what the actor reads."""
