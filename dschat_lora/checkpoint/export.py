"""What a finished run leaves behind: the adapter, and a whole model where one was trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.checkpoint.adapter_config import AdapterConfig, read_adapter_config
from dschat_lora.checkpoint.model_card import model_card
from dschat_lora.checkpoint.staging import staged_directory
from dschat_lora.config.groups import LoraConfig
from dschat_lora.engine.distributed import device, on_rank_zero
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.merge import (
    MergeReport,
    check_merge,
    merge_deviation,
    merged_state_dict,
    untied_by_merge,
)
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.lora.parallel import whole_sequences


def save_adapter(
    directory: Path,
    model: nn.Module,
    config: LoraConfig,
    *,
    base: str,
    tokenizer: Any,
    card: Mapping[str, Any],
    task_type: str = "CAUSAL_LM",
    tensors: Mapping[str, Tensor] | None = None,
) -> AdapterConfig | None:
    """Write ``directory`` in PEFT's layout from any ZeRO stage; call on every rank.

    Args:
        directory: takes its name when complete.
        model: the transformers model with adapters, possibly sharded.
        config: as applied to it.
        base: hub name or directory of the base model.
        tokenizer: written beside the weights.
        card: ``data``, ``metrics`` and ``versions`` of the model card.
        task_type: PEFT's name of the model class.
        tensors: whole, on rank 0, to be written in place of the model's own values.

    Returns:
        The configuration written, on rank 0.
    """
    own = gather_to_cpu(adapter_parameters(model)) if tensors is None else tensors
    return on_rank_zero(
        lambda: write_adapter(
            directory,
            own,
            config,
            layout=adapter_layout(model),
            base_model_name_or_path=base,
            task_type=task_type,
            write_more=lambda staging: _write_beside(staging, tokenizer, card),
        )
    )


def save_merged(
    directory: Path,
    model: Any,
    *,
    tokenizer: Any,
    probe_ids: Tensor,
    max_kl: float,
    dropouts: Mapping[str, float],
    tensors: Mapping[str, Tensor] | None = None,
) -> MergeReport | None:
    """Write base and adapter as one transformers directory; call on every rank.

    The update is added in fp32 to the untouched base and cast once. What was written is loaded
    again and compared with the unmerged model before it takes its name. Without adapters this
    is the trained model itself.

    Args:
        directory: takes its name when complete.
        model: the transformers model, possibly adapted and sharded, in evaluation mode.
        tokenizer: written beside the weights.
        probe_ids: (B, T) int64 token ids to compare on, without padding.
        max_kl: most that the merge may move the distribution, in nats per token.
        dropouts: of the base's configuration, which training changed.
        tensors: whole, on rank 0, to be written in place of the model's own values; the report
            then tells how far they move it.

    Returns:
        The measured deviation, on rank 0.

    Raises:
        ValueError: if it is larger than ``max_kl``; nothing is written then.
    """
    unmerged = _logits(model, probe_ids)
    whole = gather_to_cpu(dict(model.named_parameters()))
    for name, tensor in (tensors or {}).items():
        whole[name] = tensor.to(whole[name].dtype)

    def write() -> MergeReport:
        merged = _merged_model(model, whole)
        for name, value in dropouts.items():
            setattr(merged.config, name, value)
        with staged_directory(directory) as staging:
            merged.save_pretrained(staging)
            _save_tokenizer(tokenizer, staging)
            written = _auto_class(model).from_pretrained(staging, dtype=model.dtype)
            after = _logits(written.to(_device_with_room(written)).eval(), probe_ids)
            mask = torch.ones(after.shape[:-1], dtype=torch.bool)
            before = unmerged
            if _is_reward_model(model):
                # By how much an answer would seem to beat itself, whatever its score.
                before, after = torch.zeros_like(unmerged), after - unmerged
            report = merge_deviation(before, after, mask)
            check_merge(report, max_kl=max_kl)
        return report

    return on_rank_zero(write)


def _merged_model(model: Any, tensors: dict[str, Tensor]) -> Any:
    """A plain transformers model of the merged weights, on CPU."""
    stored = model.state_dict().keys()
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers() if name in stored}
    state = merged_state_dict(model, tensors | buffers)
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"the model is not saved: {name} holds values that are not finite")
    with torch.device("meta"):
        merged = _auto_class(model).from_config(model.config, dtype=model.dtype)
    if untied_by_merge(model):
        merged.config.tie_word_embeddings = False
    _load_by_assignment(merged, state)
    if not _is_reward_model(model):
        merged.generation_config = model.generation_config
    return merged


def _is_reward_model(model: Any) -> bool:
    return hasattr(model, "score")


def _auto_class(model: Any) -> Any:
    return AutoModelForSequenceClassification if _is_reward_model(model) else AutoModelForCausalLM


@torch.no_grad()
def _logits(model: Any, input_ids: Tensor) -> Tensor:
    """(B, T, V) logits on CPU; of a reward model (B, T, 2), the score at each token and zero.

    The softmax of a score and zero is the probability of beating an answer that scores zero.
    """
    inputs = input_ids.to(model.device)
    with whole_sequences(model):
        return _whole_logits(model, inputs)


def _whole_logits(model: Any, inputs: Tensor) -> Tensor:
    if _is_reward_model(model):
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        scores: Tensor = model.score(hidden).float().cpu()
        return torch.cat([scores, torch.zeros_like(scores)], dim=-1)
    logits: Tensor = model(input_ids=inputs, use_cache=False).logits.cpu()
    return logits


def _device_with_room(model: nn.Module) -> torch.device:
    """This rank's GPU if a second copy of the weights fits beside what is there, else CPU."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    here = device()
    if here.type == "cuda" and torch.cuda.mem_get_info(here)[0] > 1.5 * size:
        return here
    return torch.device("cpu")


def _load_by_assignment(empty: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put tensors in place of the meta model's parameters, tied names apart or together."""
    for name, tensor in state.items():
        module, _, part = name.rpartition(".")
        owner = empty.get_submodule(module)
        if part in owner._parameters:
            owner._parameters[part] = nn.Parameter(tensor, requires_grad=False)
        elif part in owner._buffers:
            owner._buffers[part] = tensor


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # The tokenizers library has no type of its own for what a disk refuses.
        if type(error) is not Exception:
            raise
        raise OSError(f"{directory}: the tokenizer cannot be written: {error}") from error


def _write_beside(staging: Path, tokenizer: Any, card: Mapping[str, Any]) -> None:
    _save_tokenizer(tokenizer, staging)
    text = model_card(read_adapter_config(staging), **card)
    (staging / "README.md").write_text(text, encoding="utf-8")
