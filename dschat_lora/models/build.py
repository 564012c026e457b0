"""A pretrained model with its adapter, whole or as the empty shape of one."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of
from dschat_lora.config import LoraConfig, ModelConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.causal_lm import Tokenizer, load_causal_lm, load_config
from dschat_lora.models.source import ModelSource


@dataclass(frozen=True)
class AdaptedModel:
    """A transformers model whose chosen layers carry LoRA factors."""

    model: Any
    lora: LoraConfig  # as applied; layers by name where an adapter is continued
    targets: list[str]  # adapted modules, in model order


def build_causal_lm(
    source: ModelSource,
    tokenizer: Tokenizer,
    config: ModelConfig,
    lora: LoraConfig,
    *,
    dtype: torch.dtype,
    seed: int,
    meta: bool,
) -> AdaptedModel:
    """Load the base, add or continue the adapter, and set what trains.

    Args:
        source: base and adapter, from :func:`find_model`.
        tokenizer: whose ids the model must hold.
        config: the user's model options.
        lora: the user's LoRA options.
        dtype: type of the base weights.
        seed: of the adapter's initial values.
        meta: only the shape, on the meta device.

    Raises:
        ValueError: if something cannot be loaded or does not fit.
    """
    model_config = load_config(source.base, config)
    model = load_causal_lm(source.base, model_config, config, dtype=dtype, meta=meta)
    _fit_vocabulary(model, tokenizer, lora)
    if source.adapter is not None:
        lora = replace(
            lora_config_of(source.adapter),
            lora_dropout=lora.lora_dropout,
            only_optimize_lora=lora.only_optimize_lora,
        )
    targets = apply_lora(model, lora, seed=seed)
    if source.adapter is not None:
        load_adapter(model, source.adapter)
    if config.add_eot_token:
        model.config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    if config.gradient_checkpointing:
        # The name changed within transformers 5; the first argument did not.
        old = model.gradient_checkpointing_enable
        enable = getattr(model, "activation_checkpointing_enable", old)
        enable({"use_reentrant": False})
    return AdaptedModel(model, lora, targets)


def check_targets(source: ModelSource, config: ModelConfig, lora: LoraConfig) -> None:
    """Try the choice of layers on the empty shape of the model, before anything takes long.

    Raises:
        ValueError: if a choice matches nothing, or the model cannot be found.
    """
    if lora.lora_dim == 0 or source.adapter is not None:
        return
    model_config = load_config(source.base, config)
    model = load_causal_lm(source.base, model_config, config, dtype=torch.float32, meta=True)
    apply_lora(model, lora, seed=0)


def _fit_vocabulary(model: Any, tokenizer: Tokenizer, lora: LoraConfig) -> None:
    """Make room for tokens added to the tokenizer, where their embeddings will be trained."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) <= rows:
        return
    if lora.lora_dim > 0:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {rows}: a new --eot_token has "
            "no trained embedding, and LoRA would leave it so; use a token the model knows"
        )
    model.resize_token_embeddings(len(tokenizer))
