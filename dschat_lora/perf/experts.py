"""Mixtures of experts as modules show them: the weights of experts, and how many a token takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dschat_lora.lora.layers import full_shape

# Names by which routers, their blocks and configurations say how many experts a token is sent to.
_CHOSEN = (
    *("top_k", "num_experts_per_tok", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)


@dataclass(frozen=True)
class ExpertWeight:
    """One matrix of every expert of a layer, fused into a tensor of three dimensions."""

    name: str  # within the module of the experts, such as gate_up_proj
    num_experts: int
    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    adapter: Any = None  # the module that adds low-rank factors to it


def expert_weights(module: nn.Module, hidden_size: int) -> list[ExpertWeight]:
    """The fused matrices that ``module`` holds of its experts; none of any other module.

    Each is a parameter, or a module in its place that has it as ``weight``. Its last two dimensions
    are (out, in), or (in, out) where the module says ``is_transposed``; where it says nothing, the
    one of ``hidden_size`` shows.
    """
    if not (hasattr(module, "num_experts") or "Expert" in type(module).__name__):
        return []
    found = []
    for name, held in [*module.named_parameters(recurse=False), *module.named_children()]:
        weight = held if isinstance(held, nn.Parameter) else getattr(held, "weight", None)
        if not isinstance(weight, nn.Parameter) or len(full_shape(weight)) != 3:
            continue
        count, outputs, inputs = full_shape(weight)
        closes = "down" in name or "out" in name
        transposed = getattr(module, "is_transposed", (outputs == hidden_size) != closes)
        if transposed:
            outputs, inputs = inputs, outputs
        adapter = held if hasattr(held, "lora_A") else None
        bias = getattr(module, f"{name}_bias", None)
        found.append(ExpertWeight(name, count, inputs, outputs, weight, bias, adapter))
    return found


def experts_per_token(holders: Iterable[nn.Module], config: Any) -> int | None:
    """How many experts a token is sent to; None where neither modules nor configuration say so.

    ``holders`` are the module of the experts and those around it, the nearest first.
    """
    near = [m for holder in holders for m in (holder, *holder.children())]
    for source in (*near, config, getattr(config, "ffn_config", None)):
        for name in _CHOSEN:
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def lists_experts(module: nn.Module, name: str) -> bool:
    """Whether ``module``, called ``name``, is a list of experts that are modules of their own."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    return "experts" in name.rpartition(".")[2]


def is_router(module: nn.Module, name: str, around: Sequence[nn.Module]) -> bool:
    """Whether a layer scores experts: it says so, or is the gate beside some."""
    last = name.rpartition(".")[2]
    if "router" in name.lower() or "Router" in type(module).__name__:
        return True
    beside = around[-1].named_children() if around else ()
    return last == "gate" and any("experts" in child for child, _ in beside)
