"""Adapters that stock PEFT would load only in part."""

from torch import nn

from dschat_lora.lora.model import lora_layers


def peft_warning(model: nn.Module) -> str | None:
    """What to say where stock PEFT drops factors of ``model``; None where it takes them all.

    PEFT applies to their names what transformers applies to those of a checkpoint, and a pattern
    meant for other names may hit them. Of a composite model that is another mapping, which the text
    model alone does not have.
    """
    if getattr(model, "text_path", None) is not None:
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # a transformers that renames nothing so
        return None
    rules = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    renamed = {
        name: new.removesuffix(".weight")
        for name in lora_layers(model)
        if (new := rename_source_key(f"{name}.weight", rules, [])[0]) != f"{name}.weight"
    }
    if not renamed:
        return None
    name, new = next(iter(renamed.items()))
    return (
        f"stock PEFT drops the factors of {len(renamed)} layers such as {name}, which transformers "
        f"renames to {new}; this package and `merge` keep them: for use in PEFT leave them out "
        "with --target_modules"
    )
