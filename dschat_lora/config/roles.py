"""The options of a model that trains, alike in every stage."""

from dataclasses import dataclass
from typing import Literal

from dschat_lora.config.groups import LoraConfig, ModelConfig, OptimConfig

MODEL = "model"  # the one role of a supervised stage
# PEFT's names of a language model and of one that scores.
Task = Literal["CAUSAL_LM", "SEQ_CLS"]


@dataclass(frozen=True)
class Role:
    """A model that trains: the one of a supervised stage, or the actor or critic of step 3."""

    prefix: str  # of the names of its options: empty, or such as ``actor_``
    task: Task
    model: ModelConfig
    lora: LoraConfig
    optim: OptimConfig
    zero_stage: int | None

    def typed(self, given: frozenset[str]) -> frozenset[str]:
        """Those of the ``given`` options that are its own, without their prefix."""
        own = (name for name in given if name.startswith(self.prefix))
        return frozenset(name.removeprefix(self.prefix) for name in own)
