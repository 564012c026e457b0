"""Placeholders for models that are not here yet, with all that checks read."""

import json
from collections.abc import Mapping
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
from dschat_lora.config.stages import StageConfig
from dschat_lora.models.source import find_model
from dschat_lora.runtime.checks import model_fields


def write_placeholder(home: Path, config: StageConfig) -> None:
    """A placeholder for a run's output, with all that later stages' checks read."""
    name, first = next(iter(config.trained.items()))
    home, model, lora = home / (name if first.prefix else ""), first.model, first.lora
    source = find_model(model.model_name_or_path)
    scores = first.task == "SEQ_CLS"
    only_adapter = lora.lora_dim > 0 and lora.only_optimize_lora
    if only_adapter:
        bits = model.base_bits
        write_adapter(home / "adapter", lora, source.base, scores=scores, bits=bits)
    if config.run.merge_adapter or not only_adapter:
        architecture = "ForSequenceClassification" if scores else "ForCausalLM"
        fields = model_fields(source) | {"architectures": [architecture]}
        write_config(home / "model", fields)
        vocabulary = Path(source.tokenizer) / "tokenizer.json"
        if vocabulary.is_file():
            (home / "model" / vocabulary.name).symlink_to(vocabulary)


def write_adapter(
    directory: Path, lora: LoraConfig, base: str, *, scores: bool, bits: int | None
) -> None:
    """A placeholder for an adapter on ``base`` in a new directory."""
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


def write_config(directory: Path, fields: Mapping[str, Any]) -> None:
    """A ``config.json`` in a new directory, which stands for a model without weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
