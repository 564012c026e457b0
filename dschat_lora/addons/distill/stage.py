"""The stage ``distill``: step 3 with its algorithm, and options under the student's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dschat_lora.config.addons import addon_options
from dschat_lora.config.groups import require
from dschat_lora.config.options import group
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.options.config import RlhfConfig


@dataclass(frozen=True)
class DistillConfig(RlhfConfig):
    """Options of step 3 for on-policy distillation; the actor is the student."""

    stage: ClassVar[str] = "distill"
    everyday: ClassVar[Sequence[str]] = (
        *("actor_model_name_or_path", "teacher_model_name_or_path", "data_path", "actor_lora_dim"),
        *("actor_learning_rate", "distill_loss", "teacher_system_prompt", "on_policy_share"),
        *("max_prompt_seq_len", "max_answer_seq_len", "per_device_generation_batch_size"),
        *("generation_batches", "per_device_training_batch_size", "temperature", "rollout_engine"),
    )
    spellings: ClassVar[Mapping[str, str]] = {
        name: f"actor_{name}"
        for name in (
            *("model_name_or_path", "lora_dim", "lora_alpha", "target_modules"),
            *("learning_rate", "lora_learning_rate"),
        )
    }

    ppo: PpoConfig = group(PpoConfig, algorithm="distill")
    addons: Any = group(addon_options("distill", vars(), RlhfConfig))

    def __post_init__(self) -> None:
        super().__post_init__()
        algorithm = self.ppo.algorithm
        require(algorithm == "distill", "algorithm", algorithm, "distill, or the verb rlhf")
