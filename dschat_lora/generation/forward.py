"""Forward passes of decoding: what a model takes, and its logits."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.devices import to_device
from dschat_lora.models.backbone import attention_windows


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the model works with our masks, positions and cache."""
    accepted = inspect.signature(model.forward).parameters
    return (
        {"position_ids", "past_key_values", "logits_to_keep"} <= accepted.keys()
        and attention_windows(model.config) is not None
        and model.config._attn_implementation in ("sdpa", "eager")
        and bool(getattr(model, "_supports_attention_backend", False))
    )


def in_shards(model: PreTrainedModel) -> bool:
    """Whether ZeRO 3 holds parameters in shards: layers gather them, and nothing else has."""
    sizes = ((p.numel(), getattr(p, "ds_numel", p.numel())) for p in model.parameters())
    return any(here != whole for here, whole in sizes)


def next_logits(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], cache: object
) -> Tensor:
    """(B, V) logits after the last column of ``ids``, whose keys and values ``cache`` takes.

    ``masks`` are by kind of attention layer, of which most models have one.
    """
    logits: Tensor = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


def padded_left(
    prompts: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
    *,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, T) int64 tokens padded on the left, and their mask: 1 on tokens, 0 on padding.

    T is ``width``, by default the length of the longest prompt.
    """
    width = width or max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return to_device(torch.tensor(ids), device), to_device(torch.tensor(real), device)
