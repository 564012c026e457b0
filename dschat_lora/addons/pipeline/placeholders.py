"""Placeholders for models that are not here yet, with all that checks read.

Published models and outputs of stages to come have them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterConfig,
    more_metadata,
    peft_fields,
)
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.stages import RewardStageConfig, SupervisedConfig
from dschat_lora.models.published import PUBLISHED, published_name, write_config
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.checks import model_fields

_CRITIC = "critic_model_name_or_path"
MODEL_OPTIONS = (
    *("model_name_or_path", "actor_model_name_or_path", _CRITIC),
    "teacher_model_name_or_path",
)


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
