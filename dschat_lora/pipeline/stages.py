"""Stages of pipelines: options, checks, and placeholders for models that are not here yet.

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
from dschat_lora.config.bundled import find_recipe
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import build_config
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.models.published import PUBLISHED, published_name, write_config
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.perf.cards import Card, find_card
from dschat_lora.rl.config import DistillConfig, RlhfConfig
from dschat_lora.rl.validation import check_rlhf
from dschat_lora.runtime.checks import model_fields
from dschat_lora.runtime.validation import DPO, REWARD, check_supervised

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


def check_stage(name: str, values: Mapping[str, Any], processes: int | None) -> Any:
    """The stage's config after its own check, whose output is discarded.

    ``processes`` is how many the launcher will start; None where it decides.

    Raises:
        ValueError: as the stage would.
    """
    stage = STAGES[name]
    if processes is None and "deepspeed_config" in values:
        values = {k: v for k, v in values.items() if k not in _OF_PROCESSES}
    # Without a number the launcher uses every GPU, which only the stage can count.
    sizes = [values.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "context")]
    least = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(processes or least)
    try:
        with redirect_stdout(io.StringIO()):
            return stage.check(build_config(stage.config, values))
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


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
