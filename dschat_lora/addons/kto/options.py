"""Options of KTO."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option

if TYPE_CHECKING:
    from dschat_lora.config.stages import DpoStageConfig


@dataclass(frozen=True)
class KtoOptions:
    """Weights of good and of bad answers."""

    fixed: ClassVar = ("desirable_weight", "undesirable_weight")

    desirable_weight: float = option(1.0, help="kto: weight of the loss on desirable answers")
    undesirable_weight: float = option(1.0, help="kto: weight of the loss on undesirable answers")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "desirable_weight", "undesirable_weight")

    def check(self, config: "DpoStageConfig") -> None:
        """Refuse weights of another loss.

        Raises:
            ValueError: naming the option.
        """
        loss = config.dpo.loss_type
        for name in (each.name for each in fields(self)):
            if name in config.given and loss != "kto" and getattr(self, name):
                value = getattr(self, name)
                raise ValueError(f"--{name} {value} is for --loss_type kto, not {loss}")
