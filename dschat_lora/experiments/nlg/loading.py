"""The model that decodes: a run's, one of the hub, or one from a file of weights."""

from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.gpt2_checkpoint import read_gpt2_checkpoint
from dschat_lora.checkpoint.lora_only import (
    LoraOnly,
    load_lora_only,
    lora_config_of_file,
    read_lora_only,
)
from dschat_lora.config.groups import LoraConfig
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.experiments.nlg.config import DecodeConfig
from dschat_lora.experiments.nlg.original import weights_file
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import Tokenizer, gpt2_with_weights
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import log_once


def load_model(
    config: DecodeConfig, source: ModelSource, tokenizer: Tokenizer, *, epoch: Path | None = None
) -> Any:
    """The model with its factors on this device; those of the file ``epoch`` if it is given.

    Raises:
        ValueError: if the weights cannot be read, or do not fit the model or the options.
    """
    dtype = DTYPES[resolve_dtype(config.dtype)]
    base, file, parts = None, None, config.enable_lora
    path = epoch or (Path(config.lora_path).expanduser() if config.lora_path else None)
    if path is not None:
        file = read_lora_only(path)
        source = ModelSource(source.base, tokenizer_of_run=source.tokenizer)
    elif (weights := weights_file(config.init_checkpoint)) is not None:
        checkpoint = read_gpt2_checkpoint(weights)
        file, parts = checkpoint.factors, parts or ("q", "v")
        if checkpoint.base:
            base = gpt2_with_weights(source.base, config.model, checkpoint, dtype=dtype)
    lora = LoraConfig() if file is None else _lora_of(file, config, parts, source)
    adapted = build_causal_lm(
        source, tokenizer, config.model, lora, dtype=dtype, seed=0, meta=False, base=base
    )
    if file is not None:
        load_lora_only(adapted.model, file)
    return adapted.model.to(device()).eval()


def _lora_of(
    file: LoraOnly, config: DecodeConfig, parts: tuple[str, ...], source: ModelSource
) -> LoraConfig:
    if config.lora_dim is not None and config.lora_dim != file.r:
        raise ValueError(
            f"--lora_dim is {config.lora_dim}, but {file.path} holds factors of rank {file.r}"
        )
    if file.settings is None:
        return lora_config_of_file(file, lora_alpha=config.lora_alpha, enable_lora=parts)
    if file.settings.base not in (None, source.base):
        log_once(f"  note         {file.path} was trained on {file.settings.base}")
    return lora_config_of_file(file, lora_alpha=config.lora_alpha, enable_lora=config.enable_lora)
