"""Export of a finished run: the adapter, and a merged or fully trained model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.checkpoint.adapter_config import AdapterConfig, read_adapter_config
from dschat_lora.checkpoint.model_card import model_card
from dschat_lora.checkpoint.score_class import score_class_code
from dschat_lora.checkpoint.tensors import writing
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.staging import staged_directory
from dschat_lora.engine.distributed import device, on_rank_zero
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.layers import value_shape
from dschat_lora.lora.merge import (
    MergeReport,
    check_merge,
    check_mergeable,
    merge_deviation,
    merged_state_dict,
    untied_by_merge,
)
from dschat_lora.lora.model import adapter_layout, adapter_parameters
from dschat_lora.lora.parallel import whole_sequences

_EXPERTS_NOTE = (
    "Experts of the base were in 4 bits too, which bitsandbytes' layers leave in 16 bits: a merged "
    "model (`dschat-lora merge`) holds the very values that the adapter was trained on."
)


def save_adapter(
    directory: Path,
    model: nn.Module,
    config: LoraConfig,
    *,
    base: str,
    tokenizer: PreTrainedTokenizerBase,
    card: Mapping[str, Any],
    base_bits: int = 16,
    base_fingerprint: str = "",
    rope_scaling: str | None = None,
    task_type: str = "CAUSAL_LM",
    tensors: Mapping[str, Tensor] | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> AdapterConfig | None:
    """Write an adapter in PEFT's layout from any ZeRO stage; call on every rank.

    ``directory`` takes its name when complete. ``card`` holds ``data``, ``metrics`` and
    ``versions`` of the model card. ``tensors``, whole, on rank 0, are written in place of the
    model's own values. ``write_more`` adds files to the directory that it is given, on rank 0.
    Returns the configuration written, on rank 0.
    """
    own = gather_to_cpu(adapter_parameters(model)) if tensors is None else tensors

    def write_more_files(staging: Path) -> None:
        write_beside(staging, model, tokenizer, card)
        if write_more is not None:
            write_more(staging)

    return on_rank_zero(
        lambda: write_adapter(
            directory,
            own,
            config,
            layout=adapter_layout(model),
            base_model_name_or_path=base,
            base_bits=base_bits,
            base_fingerprint=base_fingerprint,
            rope_scaling=rope_scaling,
            task_type=task_type,
            write_more=write_more_files,
        )
    )


def save_merged(
    directory: Path,
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase,
    probe_ids: Tensor,
    max_kl: float,
    dropouts: Mapping[str, float],
    tensors: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> MergeReport | None:
    """Write base and adapter as one transformers directory; call on every rank.

    The update is added in fp32 to the untouched base and cast once. The written model is loaded
    and compared with the unmerged one, in evaluation mode, on ``probe_ids``, (B, T) int64 without
    padding, before it takes its name. Without adapters this is the trained model itself.

    ``dropouts`` are those of the base's configuration, which training changed. ``tensors``, whole,
    on rank 0, are written in place of the model's own values. The weights are written in ``dtype``,
    by default the model's own. Returns the measured deviation, on rank 0, with that of ``tensors``
    from the model's values.

    Raises:
        ValueError: if it exceeds ``max_kl`` nats per token, or the model cannot be merged; nothing
            is written then.
    """
    check_mergeable(model)
    unmerged, kept = probe_logits(model, probe_ids), dtype or model.dtype
    whole = gather_to_cpu(dict(model.named_parameters()))
    for name, tensor in (tensors or {}).items():
        whole[name] = tensor.to(whole[name].dtype)

    def write() -> MergeReport:
        merged = _merged_model(model, whole, kept)
        for name, value in dropouts.items():
            setattr(merged.config, name, value)
        with staged_directory(directory) as staging:
            with writing(directory):
                merged.save_pretrained(staging)
                tokenizer.save_pretrained(staging)
            written = _auto_class(model).from_pretrained(staging, dtype=kept)
            after = probe_logits(written.to(_device_with_room(written)).eval(), probe_ids)
            before = unmerged
            if _is_reward_model(model):
                # The change of a score as the logit of an answer's win over itself.
                before, after = torch.zeros_like(unmerged), after - unmerged
            mask = torch.ones(after.shape[:-1], dtype=torch.bool)
            report = merge_deviation(before, after, mask)
            check_merge(report, max_kl=max_kl)
        return report

    return on_rank_zero(write)


def _merged_model(
    model: PreTrainedModel, tensors: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """A plain transformers model of the merged weights, on CPU, in ``dtype``."""
    stored = model.state_dict().keys()
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers() if name in stored}
    state = merged_state_dict(model, tensors | buffers)
    for name, tensor in state.items():
        state[name] = tensor.to(dtype) if tensor.dtype == model.dtype else tensor
        check_finite(state[name], f"the model is not saved: {name}")
    with torch.device("meta"):
        merged = _auto_class(model).from_config(model.config, dtype=dtype)
    if getattr(model, "rest", ()):
        merged.put_rest(model.on_meta())
    if untied_by_merge(model):
        merged.config.tie_word_embeddings = False
    # Not strict: of tied weights the state may have one.
    if unknown := merged.load_state_dict(state, strict=False, assign=True).unexpected_keys:
        raise RuntimeError(f"the merged model does not have {', '.join(unknown)}")
    if not _is_reward_model(model):
        merged.generation_config = model.generation_config
    return merged


def _is_reward_model(model: PreTrainedModel) -> bool:
    return hasattr(model, "score")


def _auto_class(model: PreTrainedModel) -> Any:
    if hasattr(model, "from_config"):  # the text model of a composite one
        return type(model)
    return AutoModelForSequenceClassification if _is_reward_model(model) else AutoModelForCausalLM


@torch.no_grad()
def probe_logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """(B, T, V) logits on CPU; of a reward model (B, T, 2), the score at each token and zero.

    The softmax of a score and zero is the probability of beating an answer that scores zero.
    """
    inputs = input_ids.to(model.device)
    with whole_sequences(model):
        if not _is_reward_model(model):
            logits: Tensor = model(input_ids=inputs, use_cache=False).logits.cpu()
            return logits
        hidden = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        scores: Tensor = model.score(hidden).float().cpu()
        return torch.cat([scores, torch.zeros_like(scores)], dim=-1)


def _device_with_room(model: nn.Module) -> torch.device:
    """This rank's GPU if a second copy of the weights fits into its free memory, else CPU."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    here = device()
    if here.type == "cuda" and torch.cuda.mem_get_info(here)[0] > 1.5 * size:
        return here
    return torch.device("cpu")


def write_beside(
    staging: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, card: Mapping[str, Any]
) -> None:
    """Write tokenizer and model card, and the end tokens where there are several."""
    with writing(staging):
        tokenizer.save_pretrained(staging)
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if isinstance(ends, list):
        GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(
            staging
        )
    fused = [n for n, p in model.named_parameters() if len(value_shape(p) or ()) == 3]
    text = model_card(
        read_adapter_config(staging),
        **card,
        # Of a composite model others load more than this.
        auto=getattr(model, "auto_name", None),
        score_class=score_class_code(model),
        notes=[_EXPERTS_NOTE] if fused else [],
    )
    (staging / "README.md").write_text(text, encoding="utf-8")
