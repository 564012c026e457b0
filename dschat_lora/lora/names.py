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
