"""Adapters of what stands beside the text model of a composite one."""

from transformers import PreTrainedModel

from dschat_lora.checkpoint.adapter import lora_config_of
from dschat_lora.config.groups import ALL_BESIDE, LoraConfig
from dschat_lora.lora.names import is_inside, last_name
from dschat_lora.lora.parallel import group_of
from dschat_lora.lora.targets import choose_saved, choose_targets
from dschat_lora.models.composite import TextModel
from dschat_lora.models.source import ModelSource


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
        model.put_rest(model.load_rest(source.base, meta=True))
        names = [*choose_targets(model, lora), *choose_saved(model, lora.modules_to_save)]
        model.put_rest(None)
    else:
        return
    if not any(is_inside(name, model.place.left_out) for name in names):
        return
    if group_of(model) is not None:
        raise ValueError(
            f"--tensor_parallel_size above 1 adapts {model.text_path} alone; leave out layers "
            "beside it"
        )
    model.put_rest(model.load_rest(source.base, meta=meta))


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
