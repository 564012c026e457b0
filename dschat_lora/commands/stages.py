"""The stages by name: options, checks and programs, and the defaults of their verbs."""

import io
import math
import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dschat_lora.checkpoint.history import read_state
from dschat_lora.config.addons import load, provided
from dschat_lora.config.options import (
    build_config,
    flatten,
    options_of,
    read_mapping,
    typed_options,
)
from dschat_lora.config.stages import StageConfig
from dschat_lora.models.source import find_model
from dschat_lora.runtime.resume import is_first_rank, settle, with_options
from dschat_lora.runtime.stage_main import load_late

StageT = TypeVar("StageT", bound=StageConfig)
RANK = 16  # of adapters of verbs and in Python, where nothing says one
# Of the machine's processes, which the launcher counts.
_OF_PROCESSES = ("deepspeed_config", "offload")


@dataclass(frozen=True)
class Stage:
    """A kind of run, by functions and classes whose modules are imported when it is chosen."""

    options: str  # MODULE:CLASS of the package
    checks: str  # MODULE:FUNCTION of a config, before anything heavy is imported
    program: str  # that trains by a checked config, and gives the directory, None of a dry run
    examples: str  # that the help of its verb begins with
    # options that default to the output of an earlier stage of these names
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def config(self) -> type[Any]:
        """The class of its options."""
        config_class = load_late(self.options)
        assert isinstance(config_class, type)
        return config_class

    @property
    def check(self) -> Callable[[Any], Any]:
        """What gives the resolved config, or raises a ValueError."""
        return load_late(self.checks)


STAGES: Mapping[str, Stage] = {
    "sft": Stage(
        "config.stages:SupervisedConfig",
        "supervised.validation:check_supervised",
        "supervised.stages:run_sft",
        """examples:
  dschat-lora sft --data_path mine.jsonl --model_name_or_path facebook/opt-1.3b
  dschat-lora sft --config opt-1.3b --num_gpus 8 --deepspeed_config zero2""",
    ),
    "reward": Stage(
        "config.stages:RewardStageConfig",
        "supervised.validation:check_supervised",
        "supervised.stages:run_reward",
        """examples:
  dschat-lora reward --model_name_or_path output/sft --data_path pairs.jsonl""",
        {"model_name_or_path": ("sft",)},
    ),
    "dpo": Stage(
        "config.stages:DpoStageConfig",
        "supervised.validation:check_supervised",
        "supervised.stages:run_dpo",
        """examples:
  dschat-lora dpo --model_name_or_path output/sft --data_path pairs.jsonl""",
        {"model_name_or_path": ("sft",)},
    ),
    "rlhf": Stage(
        "rl.options.config:RlhfConfig",
        "rl.loop.validation:check_rlhf",
        "rl.loop.train:run_rlhf",
        """examples:
  dschat-lora rlhf --actor_model_name_or_path output/sft \\
    --critic_model_name_or_path output/reward""",
        {"actor_model_name_or_path": ("sft", "dpo"), "critic_model_name_or_path": ("reward",)},
    ),
    # Add-ons give the fields of a stage of theirs.
    **{name: Stage(**load(path)) for name, path in provided("stage").items()},
}


def options_of_file(name: str, file: str) -> dict[str, Any]:
    """Options of a stage in a YAML file, or in a recipe of that name.

    Raises:
        ValueError: at the first thing that is unknown or cannot be used, or if it has stages of a
            pipeline and no add-on reads them.
    """
    label = f"--config {file}"
    content = read_mapping(file, label=label)
    if "stages" not in content:
        return options_of(STAGES[name].config, content, label=label)
    reader = provided("options_file").get("stages")
    if reader is None:
        raise ValueError(
            f"{label} has the stages of a pipeline, which is an add-on that is not installed"
        )
    options: dict[str, Any] = load(reader)(name, file)
    return options


def check_stage(
    name: str, values: Mapping[str, Any], processes: int | None, *, rank: int = 0
) -> StageConfig:
    """The config of a stage's verb after its check, whose output is discarded.

    ``processes`` is how many the launcher will start; None where it decides. ``rank`` is that of
    adapters where nothing says one.

    Raises:
        ValueError: as the stage would.
    """
    if processes is None and "deepspeed_config" in values:
        values = {k: v for k, v in values.items() if k not in _OF_PROCESSES}
    # Without a number the launcher uses every GPU, which only the stage can count.
    sizes = [values.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "context")]
    least = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes or least)
    try:
        with redirect_stdout(io.StringIO()):
            config: StageConfig = build_config(STAGES[name].config, values)
            return check_as_verb(config, name, rank=rank)
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def check_as_verb(config: StageT, stage: str, *, rank: int = RANK) -> StageT:
    """The config after the check of its stage, with the defaults of :func:`with_verb_defaults`.

    A run that is resumed keeps what its checkpoint records, and other ranks wait for the first.
    """
    typed = frozenset(typed_options(config))
    if is_first_rank() or not config.run.resume_from_checkpoint:
        config = with_verb_defaults(settle(config, stage=stage), rank=rank, typed=typed)
    checked: StageT = STAGES[stage].check(config)
    return checked


def with_verb_defaults(
    config: StageT, *, rank: int = RANK, typed: frozenset[str] | None = None
) -> StageT:
    """The config with what is not typed of its adapters, as if it were; records then have it.

    Each role that trains and has neither a rank, an adapter that it continues nor a checkpoint gets
    adapters of ``rank``. Where adapters alone train, the learning rate that was ``typed``, by
    default all that is given, is theirs, unless they have one of their own.
    """
    values, added = flatten(config), dict[str, Any]()
    if not values["num_train_epochs"]:
        return config
    typed = config.given if typed is None else typed
    before = read_state(Path(config.checkpoint))["config"] if config.checkpoint else {}
    for role in _roles(config):
        says_rank = f"{role}lora_dim" in config.given
        # Without a reward model values start from the actor, with its rank.
        leader = "actor_" if _follows_actor(role, values) else role
        continues = _continues_adapter(values[f"{leader}model_name_or_path"])
        if rank and leader == role and not (says_rank or continues or config.checkpoint):
            added[f"{role}lora_dim"] = rank
        settled = {**values, **added}[f"{role if says_rank else leader}lora_dim"]
        rate, of_adapter = f"{role}learning_rate", f"{role}lora_learning_rate"
        if (
            # One that is typed again as it was means what it meant.
            (rate in typed and values[rate] not in ("auto", before.get(rate)))
            and ((continues or settled) and values["only_optimize_lora"])
            and of_adapter not in typed
            and values.get("lora_lr_multiplier") is None
        ):
            added[of_adapter] = values[rate]
    return with_options(config, added) if added else config


def restated(options: Mapping[str, Any], config: StageConfig) -> dict[str, Any]:
    """``options``, as of a file, for a verb: that says where all weights train as they say no rank.

    ``config`` is what they are, or what they come to by the check of the stage.
    """
    values, said = flatten(config), dict(options)
    for role in _roles(config):
        starts_anew = not _continues_adapter(values[f"{role}model_name_or_path"])
        if starts_anew and not (values[f"{role}lora_dim"] or _follows_actor(role, values)):
            said.setdefault(f"{role}lora_dim", 0)
    return said


def _roles(config: StageConfig) -> tuple[str, ...]:
    """What the options of each model that trains begin with."""
    if not hasattr(config, "has_critic"):
        return ("",)
    return ("actor_", "critic_") if config.has_critic else ("actor_",)


def _follows_actor(role: str, values: Mapping[str, Any]) -> bool:
    return role == "critic_" and values["critic_model_name_or_path"] is None


def _continues_adapter(name: str | None) -> bool:
    try:
        return find_model(name).adapter is not None
    except ValueError:
        return False  # a check says what is wrong with the name, or a plan knows it
