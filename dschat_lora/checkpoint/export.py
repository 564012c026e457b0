"""What a finished run leaves behind: the adapter, and a whole model where one was trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.checkpoint.model_card import model_card
from dschat_lora.checkpoint.staging import staged_directory
from dschat_lora.config import LoraConfig
from dschat_lora.engine.distributed import rank
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.merge import merged_state_dict, untied_by_merge
from dschat_lora.lora.model import adapter_layout, adapter_parameters


def save_adapter(
    directory: Path,
    model: nn.Module,
    config: LoraConfig,
    *,
    base: str,
    tokenizer: Any,
    card: Mapping[str, Any],
) -> AdapterConfig | None:
    """Write ``directory`` in PEFT's layout from any ZeRO stage; call on every rank.

    Args:
        directory: takes its name when complete.
        model: the transformers model with adapters, possibly sharded.
        config: as applied to it.
        base: hub name or directory of the base model.
        tokenizer: written beside the weights.
        card: ``data``, ``metrics`` and ``versions`` of the model card.

    Returns:
        The configuration written, on rank 0.
    """
    tensors = gather_to_cpu(adapter_parameters(model))
    if rank() != 0:
        return None
    return write_adapter(
        directory,
        tensors,
        config,
        layout=adapter_layout(model),
        base_model_name_or_path=base,
        write_more=lambda staging: _write_beside(staging, tokenizer, card),
    )


def save_merged(directory: Path, model: Any, *, tokenizer: Any) -> None:
    """Write base and adapter as one transformers directory; call on every rank.

    Without adapters this is the trained model itself. The update is added in fp32 to the
    untouched base and cast once.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = gather_to_cpu(parameters)
    if rank() != 0:
        return
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers()}
    state = merged_state_dict(model, tensors | buffers)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    if untied_by_merge(model):
        empty.config.tie_word_embeddings = False
    _load_by_assignment(empty, state)
    empty.generation_config = model.generation_config
    with staged_directory(directory) as staging:
        empty.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


def _load_by_assignment(empty: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put tensors in place of the meta model's parameters, tied names apart or together."""
    for name, tensor in state.items():
        module, _, part = name.rpartition(".")
        owner = empty.get_submodule(module)
        if part in owner._parameters:
            owner._parameters[part] = nn.Parameter(tensor, requires_grad=False)
        elif part in owner._buffers:
            owner._buffers[part] = tensor


def _write_beside(staging: Path, tokenizer: Any, card: Mapping[str, Any]) -> None:
    from dschat_lora.checkpoint.adapter_config import read_adapter_config

    tokenizer.save_pretrained(staging)
    text = model_card(read_adapter_config(staging), **card)
    (staging / "README.md").write_text(text, encoding="utf-8")
