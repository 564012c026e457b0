"""The part of a model that reads text: its configuration, its blocks, and what stands beside it."""

import re
from typing import Any

from torch import nn

# Modules that read another input than text, by a word in their names.
_OTHER_INPUTS = re.compile(r"vision|visual|image|audio|speech|video|multi_?modal")


def field(config: object, name: str, default: Any = None) -> Any:
    """A field of a configuration; ``default`` where it has none, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers' answer for a field that layers have of their own
        value = None
    return default if value is None else value


def text_config(model: Any) -> Any:
    """The configuration of the part that reads text, which is the model's own as a rule."""
    get = getattr(model.config, "get_text_config", None)
    return model.config if get is None else get(decoder=True)


def text_tower(model: Any) -> nn.Module:
    """The module that reads text: the model, of one with several towers the language model."""
    if text_config(model) is model.config or not hasattr(model, "get_decoder"):
        return model  # type: ignore[no-any-return]
    return model.get_decoder()  # type: ignore[no-any-return]


def reads_text(name: str) -> bool:
    """Whether a module of this name runs on text."""
    return _OTHER_INPUTS.search(name.lower()) is None


def text_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that text runs through, by name, in order.

    They are the ``nn.ModuleList`` of as many members as the configuration says, or several lists
    that have so many together.

    Raises:
        ValueError: if there is no such list.
    """
    tower, config = text_tower(model), text_config(model)
    start = next(name for name, module in model.named_modules() if module is tower)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.startswith(start) and reads_text(name)
        if any(member._modules for member in module)
    }
    outermost = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    # Where a block has two attentions, num_hidden_layers counts these (LongCat).
    counts = [field(config, name) for name in ("num_hidden_layers", "num_layers")]
    chosen = next(([n] for c in counts for n in outermost if len(lists[n]) == c), outermost)
    blocks = {f"{name}.{i}": m for name in chosen for i, m in enumerate(lists[name])}
    if not blocks or (any(counts) and len(blocks) not in counts):
        raise ValueError(
            f"{type(model).__name__} holds no list of {counts[0]} blocks (num_hidden_layers); "
            "FLOPs and activations are counted for models whose blocks form one nn.ModuleList, or "
            "several of so many together"
        )
    return blocks
