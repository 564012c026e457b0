"""Options of a Trainer: those of the command line that matter to it, with its names and checks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dschat_lora.api.inputs import model_value
from dschat_lora.config.groups import LoraConfig, OptimConfig
from dschat_lora.config.options import build_config, group, options_in_python
from dschat_lora.config.parser import unknown_option
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.checks import apply_checks
from dschat_lora.runtime.stage_main import hush_libraries
from dschat_lora.runtime.validation import (
    SFT,
    SupervisedInputs,
    check_lora,
    check_model,
    check_tensor_parallel,
    with_base_bits,
    with_continued_lora,
    with_deepspeed_json,
    with_recomputation,
)

OPTIONS = frozenset(
    (
        *("dtype", "attn_implementation", "trust_remote_code", "base_bits", "chat_template"),
        *("add_eot_token", "eot_token", "gradient_checkpointing", "dropout"),
        *(field.name for field in fields(LoraConfig) if "hidden" not in field.metadata),
        *("per_device_train_batch_size", "per_device_eval_batch_size"),
        *("loraplus_lr_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("weight_decay", "zero_stage", "offload", "offload_activations", "deepspeed_config"),
        *("tensor_parallel_size", "sequence_parallel", "distributed_timeout", "seed"),
    )
)
_RATES = ("learning_rate", "lora_learning_rate", "lora_lr_multiplier", "expert_learning_rate")


# Of a stage those that look at the model, its adapter and its engine.
_CHECKS = (
    check_model,
    with_continued_lora,
    check_lora,
    with_base_bits,
    check_tensor_parallel,
    with_deepspeed_json,
    with_recomputation,
)


@dataclass(frozen=True)
class TrainerConfig(SupervisedConfig):
    """The options of a supervised stage, of which a Trainer takes some."""

    # optim_step says the rate of all that trains; groups differ by --loraplus_lr_ratio alone.
    optim: OptimConfig = group(OptimConfig, learning_rate=1.0, lora_learning_rate=1.0)


@dataclass(frozen=True)
class CheckedOptions:
    """Options as they are used, and what the model's name stands for."""

    config: TrainerConfig
    source: ModelSource


def check_options(model: object, values: Mapping[str, Any]) -> CheckedOptions:
    """The options that were given, over the command line's defaults.

    ``model`` is a name, a path, a run, (model, tokenizer), or None for the bundled model.

    Raises:
        TypeError: for a name that is unknown.
        ValueError: for a value that is not allowed, or options that contradict each other.
    """
    hush_libraries()
    config = build_config(TrainerConfig, _converted(values))
    name = model_value(model)
    config = replace(config, model=replace(config.model, model_name_or_path=name))
    source = find_model(name)
    inputs = SupervisedInputs(SFT, source, config.data)
    return CheckedOptions(apply_checks(config, inputs, _CHECKS), source)


def _converted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Each value as if it were typed."""
    for name in values:
        if name in _RATES:
            raise TypeError(
                f"unknown option --{name}; the rate of a step is given to it: "
                "optim_step(learning_rate=...)"
            )
        if name not in OPTIONS:
            raise TypeError(unknown_option(f"--{name}", OPTIONS))
    return options_in_python(TrainerConfig, values)
