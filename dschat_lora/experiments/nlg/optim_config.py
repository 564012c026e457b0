"""The optimizer and the learning-rate schedules of data-to-text training."""

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from dschat_lora.algos.schedules import cycle
from dschat_lora.config.groups import OptimConfig, require
from dschat_lora.config.options import option

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True)
class NlgOptimConfig(OptimConfig):
    """The optimizer and the schedules of microsoft/LoRA's GPT-2 experiments."""

    lr_scheduler_type: Literal["linear", "cosine", "cycle", "constant"] = option(  # type: ignore[assignment]
        "linear",
        help="shape of the rate over the steps, as in the original; cycle follows --i_steps and "
        "--i_lrs",
    )
    i_steps: str | None = option(
        None, help="steps of --lr_scheduler_type cycle, such as 0,500,26290; the last ends the run"
    )
    i_lrs: str | None = option(
        None, help="learning rates at --i_steps, such as 0,2e-4,0; straight lines lie between"
    )
    scheduler_counts_micro_steps: bool = option(
        False,
        help="--num_warmup_steps, --i_steps and the run's length count micro-batches, as the "
        "original does, and not optimizer steps",
    )
    correct_bias: bool = option(
        True, help="correct Adam's moments for starting at zero (no-: the original's default)"
    )
    decay_after_update: bool = option(
        False, help="decay the weights that the update has made, as the original's AdamW does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_cycle = self.lr_scheduler_type == "cycle"
        for name in ("i_steps", "i_lrs"):
            if (getattr(self, name) is not None) != is_cycle:
                wanted = "needs" if is_cycle else "alone takes"
                raise ValueError(f"--lr_scheduler_type cycle {wanted} --{name}")
        if is_cycle:
            cycle(0, steps=self.turns[0], rates=self.turns[1])

    @property
    def turns(self) -> tuple[list[int], list[float]]:
        """Steps and rates of a cycle.

        Raises:
            ValueError: naming the option that holds no list of numbers.
        """
        return (
            _numbers("i_steps", self.i_steps or "", int),
            _numbers("i_lrs", self.i_lrs or "", float),
        )


def _numbers(name: str, text: str, kind: type[NumberT]) -> list[NumberT]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    usable = bool(numbers) and all(math.isfinite(n) and n >= 0 for n in numbers)
    require(usable, name, text, "numbers >= 0 with commas between")
    return numbers
