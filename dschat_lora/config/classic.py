"""Options of DeepSpeed-Chat's step 3, most of which need nothing here, and of the log."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import accepted, classic, option
from dschat_lora.config.when import no_effect


def _inference_size_note(value: Callable[[str], Any]) -> str:
    """A message where ``--inference_tp_size`` is not what it is in any case."""
    size, training = value("inference_tp_size"), value("tensor_parallel_size")
    if size in (1, training):
        return ""
    where = f"the processes that hold the model (--tensor_parallel_size {training})"
    return no_effect(f"inference_tp_size {size}", f": rollouts run on {where}")


@dataclass(frozen=True)
class ClassicConfig:
    """Further options of DeepSpeed-Chat, and of the log."""

    section = "rollouts"

    only_optimize_lora: bool = option(
        True,
        help="freeze base models that have an adapter (no-: also train them)",
        section="LoRA",
        when="actor_lora_dim or critic_lora_dim",
    )
    enable_ema: bool = option(
        False,
        help="keep an exponential moving average of the actor, saved to actor_ema/",
        section="training",
    )
    ema_decay: float = option(
        0.992,
        help="decay of the moving average",
        section="training",
        when="enable_ema",
    )
    log_rollouts: int = option(
        128,
        help="number of responses per iteration logged to rollouts.jsonl.gz; 0: none",
        section="logging",
    )
    print_answers: bool = option(
        False, help="print a response at every iteration", section="logging"
    )
    print_answers_interval: int = option(
        10,
        help="iterations between printed responses; 0: never",
        section="logging",
        when="not print_answers",
    )
    enable_test_mode: bool = classic(False, help="stop after --test_stop_step optimizer steps")
    test_stop_step: int = classic(
        0, help="number of optimizer steps of --enable_test_mode", when="enable_test_mode"
    )
    num_padding_at_beginning: int = accepted(1, "; nothing is inferred from padding")
    align_overflow: bool = accepted(False, "; a non-finite loss skips both steps")
    offload_reference_model: bool = accepted(False, "; the reference shares the actor's base")
    offload_reward_model: bool = accepted(False, "; the reward model shares the critic's base")
    enable_hybrid_engine: bool = accepted(False, "; rollouts have their own decode loop")
    unpin_actor_parameters: bool = accepted(False, ", for its hybrid engine")
    release_inference_cache: bool = option(
        False,
        help="free the KV cache before each update (default: keep it if the GPU has room for it)",
        section="memory and processes",
    )
    inference_tp_size: int = classic(
        1,
        help="accepted from DeepSpeed-Chat, for its hybrid engine; rollouts use the processes that "
        "hold the model (--tensor_parallel_size)",
        when=_inference_size_note,
    )
    tp_gather_partition_size: int = accepted(8, ", for its hybrid engine")
    enable_mixed_precision_lora: bool = accepted(
        False, "; --deepspeed_config sets quantised weights"
    )

    def __post_init__(self) -> None:
        require_numbers(self, "in [0, 1)", "ema_decay")
        require_numbers(self, ">= 1", "inference_tp_size")
        require_numbers(self, ">= 0", "log_rollouts", "print_answers_interval", "test_stop_step")
        if self.enable_test_mode and not self.test_stop_step:
            raise ValueError("--enable_test_mode needs --test_stop_step, the number of steps")
