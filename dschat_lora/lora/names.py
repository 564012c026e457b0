"""What names of layers and parameters tell. Imports no torch."""

import re
from collections.abc import Iterable

# Of all experts of a layer, in the order in which every class of them registers these, and PEFT
# wraps them, inmost first.
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_OF_EXPERT = re.compile(rf"(^|\.)experts\.(\d+\.|({'|'.join(EXPERT_WEIGHTS)})(\.|$))")


def is_of_expert(name: str) -> bool:
    """Whether a layer or a parameter of this name is an expert's: of fused ones, or of a list."""
    return _OF_EXPERT.search(name) is not None


def adapted_modules(names: Iterable[str]) -> set[str]:
    """Names of the modules of which there are LoRA factors among ``names`` of parameters."""
    return {name.rpartition(".")[0] for name in names if ".lora_" in name}


def is_expert_weight(name: str) -> bool:
    """Whether an adapted layer of this name is the fused weight of experts."""
    experts, _, weight = name.rpartition(".")
    return is_ending(experts, "experts") and weight in EXPERT_WEIGHTS


def is_inside(name: str, parents: Iterable[str], *, strictly: bool = False) -> bool:
    """Whether module ``name`` lies below one of ``parents``, or (unless strictly) is one."""
    return any(
        name.startswith(f"{parent}.") or (not strictly and name == parent) for parent in parents
    )


def is_ending(name: str, ending: str) -> bool:
    """Whether a dotted name is ``ending``, or ends in it after a dot."""
    return name == ending or name.endswith(f".{ending}")


def last_name(path: str) -> str:
    """The last part of a path that is not a number, with the numbers after it."""
    parts = path.split(".")
    start = next((i for i in reversed(range(len(parts))) if not parts[i].isdigit()), 0)
    return ".".join(parts[start:])
