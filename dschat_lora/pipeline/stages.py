"""Stages of pipelines: options, checks, and inputs from earlier stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.perf.cards import Card, find_card
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.validation import check_rlhf
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised


@dataclass(frozen=True)
class Stage:
    """A kind of run."""

    config: type  # of its options
    check: Callable[[Any], Any]  # of the config, before anything heavy is imported
    # options that default to the output of an earlier stage of these names
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


STAGES = {
    "sft": Stage(SupervisedConfig, check_supervised),
    "reward": Stage(
        RewardStageConfig,
        partial(check_supervised, rules=REWARD),
        {"model_name_or_path": ("sft",)},
    ),
    "dpo": Stage(
        DpoStageConfig,
        partial(check_supervised, rules=DPO),
        {"model_name_or_path": ("sft",)},
    ),
    "rlhf": Stage(
        RlhfConfig,
        check_rlhf,
        {"actor_model_name_or_path": ("sft", "dpo"), "critic_model_name_or_path": ("reward",)},
    ),
}


def planned_card(device: str | None) -> Card | None:
    """The card that a plan is for, by its name or its memory; None for no particular device.

    Raises:
        ValueError: for a name of none.
    """
    return None if device is None else find_card(device)
