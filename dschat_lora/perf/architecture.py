"""What modules show of a model's architecture: its text tower, blocks, layers and experts."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dschat_lora.lora.layers import full_shape, is_conv1d
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.lora.parallel import ParallelEmbedding, ParallelLinear
from dschat_lora.lora.trained import TrainedBias

# Modules that read another input than text, by a word in their names.
_OTHER_INPUTS = re.compile(r"vision|visual|image|audio|speech|video|multi_?modal")
# Names by which routers, their blocks and configurations say how many experts a token is sent to.
_EXPERTS_PER_TOKEN = (
    *("top_k", "num_experts_per_tok", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)


def field(config: object, name: str, default: object = None) -> Any:
    """A field of a configuration; ``default`` where it has none, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers' answer for a field that layers have of their own
        value = None
    return default if value is None else value


def text_config(model: nn.Module) -> Any:
    """The configuration of the part that reads text, which is the model's own as a rule."""
    get = getattr(model.config, "get_text_config", None)
    return model.config if get is None else get(decoder=True)


def text_tower(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of what reads text: the model, of one with several towers one of these."""
    if text_config(model) is model.config or not hasattr(model, "get_decoder"):
        return "", model
    tower = model.get_decoder()  # type: ignore[operator]
    return next(named for named in model.named_modules() if named[1] is tower)


def beside_text(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that text does not run through, such as a vision tower, by name."""
    path = text_tower(model)[0].split(".")
    others_by_name = {
        name: m for name, m in model.named_modules() if _OTHER_INPUTS.search(name.lower())
    }
    for i in range(1, len(path)):
        around = ".".join(path[:i])
        children = model.get_submodule(around).named_children()
        others_by_name |= {
            f"{around}.{name}": module for name, module in children if name != path[i]
        }
    outermost = (
        n for n in others_by_name if not any(n.startswith(f"{other}.") for other in others_by_name)
    )
    return {name: others_by_name[name] for name in outermost}


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


def layer_sizes(module: Any) -> tuple[int, int] | None:
    """(in, out) of a layer that multiplies by its weight or by low-rank factors, else None."""
    if hasattr(module, "lora_embedding_A"):
        return 0, module.out_features
    if hasattr(module, "lora_A") or isinstance(module, nn.Linear | ParallelLinear | NF4Linear):
        return module.in_features, module.out_features
    if is_conv1d(module):
        return module.nx, module.nf
    if isinstance(module, TrainedBias) and module.kind in ("Linear", "Conv1D", "NF4Linear"):
        inputs, outputs = full_shape(module.weight)
        return (inputs, outputs) if module.transposed else (outputs, inputs)
    weight = module._parameters.get("weight")  # of a router: (experts, in)
    if weight is None or isinstance(module, nn.Embedding | ParallelEmbedding | TrainedBias):
        return None
    shape = full_shape(weight)
    return (shape[1], shape[0]) if len(shape) == 2 else None


@dataclass(frozen=True)
class ExpertWeight:
    """One matrix of every expert of a layer, fused into a tensor of three dimensions."""

    name: str  # within the module of the experts, such as gate_up_proj
    num_experts: int
    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    adapter: nn.Module | None = None  # the module that adds low-rank factors to it


def expert_weights(module: nn.Module, hidden_size: int) -> list[ExpertWeight]:
    """The fused matrices that ``module`` holds of its experts; none of any other module.

    Each is a parameter, or a module in its place that has it as ``weight``. Its last two dimensions
    are (out, in), or (in, out) where the module says ``is_transposed``; where it says nothing, the
    one of ``hidden_size`` shows.
    """
    if not (hasattr(module, "num_experts") or "Expert" in type(module).__name__):
        return []
    matrices = []
    for name, held in [*module.named_parameters(recurse=False), *module.named_children()]:
        weight = held if isinstance(held, nn.Parameter) else getattr(held, "weight", None)
        if not isinstance(weight, nn.Parameter) or len(full_shape(weight)) != 3:
            continue
        count, outputs, inputs = full_shape(weight)
        closes = "down" in name or "out" in name
        if getattr(module, "is_transposed", (outputs == hidden_size) != closes):
            outputs, inputs = inputs, outputs
        adapter = held if isinstance(held, nn.Module) and hasattr(held, "lora_A") else None
        bias = getattr(module, f"{name}_bias", None)
        matrices.append(ExpertWeight(name, count, inputs, outputs, weight, bias, adapter))
    return matrices


def experts_per_token(holders: Iterable[nn.Module], config: object) -> int | None:
    """How many experts a token is sent to; None where neither modules nor configuration say so.

    ``holders`` are the module of the experts and those around it, the nearest first.
    """
    near = [m for holder in holders for m in (holder, *holder.children())]
    for source in (*near, config, getattr(config, "ffn_config", None)):
        for name in _EXPERTS_PER_TOKEN:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def lists_experts(module: nn.Module, name: str) -> bool:
    """Whether ``module``, called ``name``, is a list of experts that are modules of their own."""
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) and len(module) >= 2
    return is_list and "experts" in name.rpartition(".")[2]


def is_router(module: nn.Module, name: str, around: Sequence[nn.Module]) -> bool:
    """Whether a layer scores experts: it says so, or is the gate beside some."""
    if "router" in name.lower() or "Router" in type(module).__name__:
        return True
    beside = around[-1].named_children() if around else ()
    return name.rpartition(".")[2] == "gate" and any("experts" in child for child, _ in beside)
