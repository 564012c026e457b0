"""Stages of pipelines: script, options, checks, and inputs from earlier stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.rlhf.config import RlhfConfig
from dschat_lora.rlhf.validation import check_rlhf
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised

SCRIPTS = Path(__file__).parents[2] / "training"


@dataclass(frozen=True)
class Stage:
    """A kind of run."""

    folder: str  # of its script, in training/
    config: type  # of its options
    check: Callable[[Any], Any]  # of the config, before anything heavy is imported
    # options that default to the output of an earlier stage of these names
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The script that the launcher runs."""
        return SCRIPTS / self.folder / "main.py"


STAGES = {
    "sft": Stage("step1_sft", SupervisedConfig, check_supervised),
    "reward": Stage(
        "step2_reward",
        RewardStageConfig,
        partial(check_supervised, rules=REWARD),
        {"model_name_or_path": ("sft",)},
    ),
    "dpo": Stage(
        "step2_dpo",
        DpoStageConfig,
        partial(check_supervised, rules=DPO),
        {"model_name_or_path": ("sft",)},
    ),
    "rlhf": Stage(
        "step3_rlhf",
        RlhfConfig,
        check_rlhf,
        {"actor_model_name_or_path": ("sft", "dpo"), "critic_model_name_or_path": ("reward",)},
    ),
}


def check_scripts() -> None:
    """Raise ValueError, naming the place, where the stage scripts are missing."""
    missing = [stage.script for stage in STAGES.values() if not stage.script.is_file()]
    if missing:
        raise ValueError(
            f"a pipeline runs the stage scripts of a checkout of the repository, and "
            f"{missing[0]} does not exist; install the package from a checkout by pip install -e ."
        )
