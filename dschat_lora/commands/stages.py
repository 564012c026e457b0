"""Stages: options, checks, their verbs' defaults, and placeholders for models not here yet.

Published models and outputs of stages to come have placeholders, with all that checks read.
"""

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    more_metadata,
    peft_fields,
)
from dschat_lora.checkpoint.history import read_state
from dschat_lora.config.bundled import find_recipe
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import build_config, flatten, typed_options
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.models.published import PUBLISHED, published_name, write_config
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.perf.cards import Card, find_card
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import DistillConfig, RlhfConfig
from dschat_lora.runtime.checks import model_fields
from dschat_lora.runtime.resume import is_first_rank, settle, with_options
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised

RANK = 16  # of adapters of verbs and in Python, where nothing says one
_CRITIC = "critic_model_name_or_path"
MODEL_OPTIONS = (
    *("model_name_or_path", "actor_model_name_or_path", _CRITIC),
    "teacher_model_name_or_path",
)
# Of the machine's processes, which the launcher counts.
_OF_PROCESSES = ("deepspeed_config", "offload")


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
    "distill": Stage(
        DistillConfig,
        check_rlhf,
        {"actor_model_name_or_path": ("sft", "dpo"), "teacher_model_name_or_path": ("rlhf",)},
    ),
}


def planned_card(device: str | None) -> Card | None:
    """The card that a plan is for, by its name or its memory; None for no particular device.

    Raises:
        ValueError: for a name of none.
    """
    return None if device is None else find_card(device)


def names_model(word: str) -> bool:
    """Whether a word is a model's name or path, and no stage, pipeline's file or recipe.

    Raises:
        ValueError: if it is none of these.
    """
    path = Path(word).expanduser()
    if word in STAGES or path.suffix in (".yaml", ".yml"):
        return False
    if path.exists():
        return path.is_dir() or path.name == "config.json" or path.suffix == ".gguf"
    try:
        find_recipe(word, label=word)
    except ValueError as error:
        if "/" in word or published_name(word):
            return True
        raise ValueError(
            f"{error}; a stage is one of {', '.join(STAGES)}, and a model is named as owner/name, "
            "or by its directory"
        ) from error
    return False


def check_stage(
    name: str, values: Mapping[str, Any], processes: int | None, *, rank: int = 0
) -> Any:
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
            config: Any = build_config(STAGES[name].config, values)
            return check_as_verb(config, name, rank=rank)
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


def check_as_verb(config: Any, stage: str, *, rank: int = RANK) -> Any:
    """The config after the check of its stage, with the defaults of :func:`with_verb_defaults`.

    A run that is resumed keeps what its checkpoint records, and other ranks wait for the first.
    """
    typed = frozenset(typed_options(config))
    if is_first_rank() or not config.run.resume_from_checkpoint:
        config = with_verb_defaults(settle(config, stage=stage), rank=rank, typed=typed)
    return STAGES[stage].check(config)


def with_verb_defaults(
    config: Any, *, rank: int = RANK, typed: frozenset[str] | None = None
) -> Any:
    """The config with what is not typed of its adapters, as if it were; records then have it.

    Each role that trains and has neither a rank, an adapter that it continues nor a checkpoint gets
    adapters of ``rank``. Where adapters alone train, the learning rate that was ``typed``, by
    default all that is given, is theirs, unless they have one of their own.

    Raises:
        ValueError: if the rate is to be found by ``--lr_probe`` too.
    """
    values, found = flatten(config), dict[str, Any]()
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
            found[f"{role}lora_dim"] = rank
        settled = {**values, **found}[f"{role if says_rank else leader}lora_dim"]
        rate, of_adapter = f"{role}learning_rate", f"{role}lora_learning_rate"
        if (
            # One that is typed again as it was means what it meant.
            (rate in typed and values[rate] not in ("auto", before.get(rate)))
            and ((continues or settled) and values["only_optimize_lora"])
            and of_adapter not in typed
            and values.get("lora_lr_multiplier") is None
        ):
            if values.get("lr_probe"):
                raise ValueError(
                    f"--lr_probe {values['lr_probe']} finds the rate that --{rate} "
                    f"{values[rate]:g} gives; leave one out"
                )
            found[of_adapter] = values[rate]
    return with_options(config, found) if found else config


def restated(options: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """``options``, as of a file, for a verb: that says where all weights train as they say no rank.

    ``config`` is what they are, or what they come to by the check of the stage.
    """
    values, found = flatten(config), dict(options)
    for role in _roles(config):
        starts_anew = not _continues_adapter(values[f"{role}model_name_or_path"])
        if starts_anew and not (values[f"{role}lora_dim"] or _follows_actor(role, values)):
            found.setdefault(f"{role}lora_dim", 0)
    return found


def _roles(config: Any) -> tuple[str, ...]:
    """What the options of each model that trains begin with."""
    if not isinstance(config, RlhfConfig):
        return ("",)
    return ("actor_", "critic_") if config.has_critic else ("actor_",)


def _follows_actor(role: str, values: Mapping[str, Any]) -> bool:
    return role == "critic_" and values["critic_model_name_or_path"] is None


def _continues_adapter(name: str | None) -> bool:
    try:
        return find_model(name).adapter is not None
    except ValueError:
        return False  # a check says what is wrong with the name, or a plan knows it


def write_placeholder(home: Path, config: SupervisedConfig | RlhfConfig) -> None:
    """A placeholder for a run's output, with all that later stages' checks read."""
    if isinstance(config, RlhfConfig):
        home, model = home / "actor", config.actor.model(config.load)
        lora = config.actor.lora(config.classic.only_optimize_lora)
    else:
        model, lora = config.model, config.lora
    source = find_model(model.model_name_or_path)
    scores = isinstance(config, RewardStageConfig)
    only_adapter = lora.lora_dim > 0 and lora.only_optimize_lora
    if only_adapter:
        bits = model.base_bits
        _write_adapter(home / "adapter", lora, source.base, scores=scores, bits=bits)
    if config.run.merge_adapter or not only_adapter:
        architecture = "ForSequenceClassification" if scores else "ForCausalLM"
        fields = model_fields(source) | {"architectures": [architecture]}
        write_config(home / "model", fields)
        vocabulary = Path(source.tokenizer) / "tokenizer.json"
        if vocabulary.is_file():
            (home / "model" / vocabulary.name).symlink_to(vocabulary)


def with_placeholders(stage: str, options: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """The options with a placeholder below ``home`` for each published model that they name.

    The critic's is a reward model: an adapter of ``--critic_lora_dim`` on that base if there is
    one, as the reward stage leaves it. A ``config.json`` stands for its directory.
    """
    values = dict(options)
    for option in MODEL_OPTIONS:
        given = values.get(option)
        if not isinstance(given, str) or "://" in given or Path(given).expanduser().is_dir():
            continue
        if Path(given).name == "config.json" and Path(given).expanduser().is_file():
            values[option] = str(Path(given).expanduser().parent)
        elif name := published_name(given):
            base = home / name
            if not base.exists():
                write_config(base, PUBLISHED[name])
            values[option] = str(base)
            if option == _CRITIC:
                values[_CRITIC] = _write_reward_model(values, base)
    return values


def _write_reward_model(values: dict[str, Any], base: Path) -> str:
    """A placeholder for a reward model on ``base``; takes the options that its adapter holds."""
    rank, home = values.get("critic_lora_dim", 0), base.with_name(f"{base.name}-reward")
    if not rank:
        fields = json.loads((base / "config.json").read_text(encoding="utf-8"))
        write_config(home, fields | {"architectures": ["ForSequenceClassification"]})
        return str(home)
    own = {
        name.removeprefix("critic_"): values.pop(name)
        for name in ("critic_target_modules", "critic_lora_module_name")
        if name in values
    }
    scale = {
        n: values[f"critic_{n}"] for n in ("lora_alpha", "use_rslora") if f"critic_{n}" in values
    }
    lora = LoraConfig(lora_dim=rank, **own, **scale)
    bits = values.get("base_bits")
    _write_adapter(home / "adapter", lora, str(base), scores=True, bits=bits)
    return str(home)


def as_planned(source: ModelSource, home: Path) -> ModelSource:
    """The source, without weights to read where its adapter is a placeholder in ``home``."""
    if source.adapter is None or not source.adapter.is_relative_to(home):
        return source
    config = source.adapter_config
    assert config is not None
    targets = config.target_modules
    lora = LoraConfig(
        lora_dim=config.r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        target_modules=(targets,) if isinstance(targets, str) else targets,
        modules_to_save=config.modules_to_save,
        enable_lora=config.enable_lora,
    )
    return replace(source, planned=lora)


def _write_adapter(
    directory: Path, lora: LoraConfig, base: str, *, scores: bool, bits: int | None
) -> None:
    directory.mkdir(parents=True)
    adapter = AdapterConfig(
        base_model_name_or_path=base,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        r=lora.lora_dim,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        bias=lora.train_bias,
        target_modules=lora.target_modules,
        modules_to_save=("score",) if scores else (),
        fan_in_fan_out=False,
        enable_lora=lora.enable_lora,
        base_bits=bits,
    )
    (directory / CONFIG_FILE).write_text(json.dumps(peft_fields(adapter)), encoding="utf-8")
    head = {"dtype": "F32", "shape": [1, 0], "data_offsets": [0, 0]}
    tensors = {"base_model.model.score.weight": head} if scores else {}
    metadata = more_metadata(adapter)
    header = json.dumps(({"__metadata__": metadata} if metadata else {}) | tensors).encode()
    (directory / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
