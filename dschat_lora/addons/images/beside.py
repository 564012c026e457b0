"""Adapters of what stands beside the text model of a composite one."""

import copy

import torch
from transformers import PreTrainedModel

from dschat_lora.checkpoint.adapter import lora_config_of
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.values import ALL_BESIDE
from dschat_lora.lora.names import is_inside, last_name
from dschat_lora.lora.parallel import group_of
from dschat_lora.lora.targets import choose_saved, choose_targets
from dschat_lora.models.composite import TextModel, unbuildable_left_out, whole_config
from dschat_lora.models.four_bit_base import hold_four_bits
from dschat_lora.models.source import ModelSource
from dschat_lora.models.stored_weights import empty_parameters, load_parts


def load_adapted(
    model: PreTrainedModel, source: ModelSource, lora: LoraConfig, *, meta: bool
) -> None:
    """Load what stands beside the text model of a composite one, if layers of it are adapted.

    Raises:
        ValueError: if its text model is divided among processes.
    """
    if not isinstance(model, TextModel):
        return
    if source.adapter is not None:
        stored = source.planned or lora_config_of(source.adapter)
        names = [*stored.target_modules, *stored.modules_to_save]
    elif lora.lora_dim and _may_reach(model, lora):
        model.put_rest(load_rest(model, source.base, meta=True))
        names = [*choose_targets(model, lora), *choose_saved(model, lora.modules_to_save)]
        model.put_rest(None)
    else:
        return
    if not any(is_inside(name, model.place.left_out) for name in names):
        return
    if group_of(model) is not None:
        raise ValueError(
            f"with --tensor_parallel_size above 1 only {model.text_path} can be adapted; remove "
            "other layers"
        )
    model.put_rest(load_rest(model, source.base, meta=meta))


def load_rest(model: TextModel, path: str, *, meta: bool) -> PreTrainedModel:
    """The composite model at ``path`` without its text model, frozen, in ``model``'s type.

    Raises:
        ValueError: if the files lack some of it.
    """
    whole, kind = copy.deepcopy(whole_config(model.config)), model.whole_class
    with torch.device("meta") if meta else empty_parameters(), unbuildable_left_out():
        built: PreTrainedModel = kind._from_config(whole, dtype=model.dtype)
    for part in (model.place.path, model.place.head):
        above, _, last = (part or "").rpartition(".")
        if last:
            delattr(built.get_submodule(above), last)
    built.all_tied_weights_keys = {}
    if not meta:
        hold_four_bits(built, path, "as the files are")
        load_parts(built, path)
    return built.requires_grad_(False).eval()


def _may_reach(model: TextModel, lora: LoraConfig) -> bool:
    """Whether the options may choose layers that ``model`` does not have yet.

    So do those that name a part of them, and those that match nothing in the model.
    """
    named = ",".join((*lora.target_modules, lora.lora_module_name or "", *lora.modules_to_save))
    parts = (ALL_BESIDE, *map(last_name, model.place.left_out))
    if any(part in named for part in parts):
        return True
    try:
        choose_targets(model, lora)
    except ValueError:
        return True
    return False
