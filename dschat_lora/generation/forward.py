"""Forward passes of decoding: what a model takes, and its logits."""

import inspect
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from dschat_lora.algos.devices import to_device
from dschat_lora.models.backbone import attends, attention_windows
from dschat_lora.models.recurrent import recurrent_layers

# Whether models gave with our cache what they give without, where that was tried.
TRIED: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the model works with our masks, positions and cache."""
    accepted = inspect.signature(model.forward).parameters.keys()
    own = {"position_ids", "past_key_values"} if attends(model.config) else {"cache_params"}
    return (
        own | {"logits_to_keep"} <= accepted
        and attention_windows(model.config) is not None
        and model.config._attn_implementation in ("sdpa", "eager")
        and _keeps_states(model)
        and TRIED.get(model, True)
    )


def _keeps_states(model: PreTrainedModel) -> bool:
    """Whether all that layers keep of earlier tokens is in the cache."""
    layers = recurrent_layers(model)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if not layers:
        backend = bool(getattr(model, "_supports_attention_backend", False))
        return backend and not kinds & {"linear_attention", "conv"}
    # Versions before have no such method of a cache; some types keep states in the layers.
    accepted = (inspect.signature(layer.forward).parameters for layer in layers)
    caches = all({"cache_params", "past_key_values"} & names.keys() for names in accepted)
    # Prompts of each length are read by a pass of their own, of which ranks have unlike numbers.
    return caches and hasattr(Cache, "get_conv_state") and not in_shards(model)


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
    inputs: dict[str, object] = {"input_ids": ids, "use_cache": True, "logits_to_keep": 1}
    if not attends(model.config):
        inputs["cache_params"] = cache
    else:
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        inputs |= {"position_ids": positions, "attention_mask": mask, "past_key_values": cache}
    logits: Tensor = model(**inputs).logits
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
