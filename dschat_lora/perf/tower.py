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


def text_tower(model: Any) -> tuple[str, nn.Module]:
    """Name and module of what reads text: the model, of one with several towers one of these."""
    if text_config(model) is model.config or not hasattr(model, "get_decoder"):
        return "", model
    tower = model.get_decoder()
    return next(named for named in model.named_modules() if named[1] is tower)


def beside_text(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that text does not run through, such as a vision tower, by name."""
    path = text_tower(model)[0].split(".")
    found = {name: m for name, m in model.named_modules() if _OTHER_INPUTS.search(name.lower())}
    for i in range(1, len(path)):
        around = ".".join(path[:i])
        children = model.get_submodule(around).named_children()
        found |= {f"{around}.{name}": module for name, module in children if name != path[i]}
    outermost = (n for n in found if not any(n.startswith(f"{other}.") for other in found))
    return {name: found[name] for name in outermost}


def text_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that text runs through, by name, in order.

    They are the ``nn.ModuleList`` of as many members as the configuration says, or several lists
    that have so many together.

    Raises:
        ValueError: if there is no such list.
    """
    config, others = text_config(model), tuple(f"{name}." for name in beside_text(model))
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not name.startswith(others)
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
