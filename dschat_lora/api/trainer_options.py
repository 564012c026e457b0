"""Options of a Trainer: those of the command line that matter to it, with its names and checks."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dschat_lora.api.inputs import model_value
from dschat_lora.config.groups import (
    BatchConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from dschat_lora.config.options import build_config, given_options, group, options_in_python
from dschat_lora.config.parser import unknown_option
from dschat_lora.engine.ds_config import read_deepspeed_json, reconcile
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.models.tensor_parallel_checks import check_processes, check_training
from dschat_lora.runtime.checks import (
    check_adapter_files,
    check_divided,
    check_lora_options,
    check_task,
    continued_lora,
    recomputing,
    settled_base_bits,
)
from dschat_lora.runtime.resume import launched_processes

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


@dataclass(frozen=True)
class TrainerConfig:
    """The groups of options that a Trainer takes some of."""

    model: ModelConfig = group(ModelConfig)
    lora: LoraConfig = group(LoraConfig)
    batch: BatchConfig = group(BatchConfig)
    # optim_step says the rate of all that trains; groups differ by --loraplus_lr_ratio alone.
    optim: OptimConfig = group(OptimConfig, learning_rate=1.0, lora_learning_rate=1.0)
    parallel: ParallelConfig = group(ParallelConfig)
    run: RunConfig = group(RunConfig)
    given: frozenset[str] = given_options()


@dataclass(frozen=True)
class CheckedOptions:
    """Options as they are used, and what the model's name stands for."""

    config: TrainerConfig
    source: ModelSource
    deepspeed_json: Mapping[str, Any]


def check_options(model: object, values: Mapping[str, Any]) -> CheckedOptions:
    """The options that were given, over the command line's defaults.

    ``model`` is a name, a path, a run, (model, tokenizer), or None for the bundled model.

    Raises:
        TypeError: for a name that is unknown.
        ValueError: for a value that is not allowed, or options that contradict each other.
    """
    config = build_config(TrainerConfig, _converted(values))
    name = model_value(model)
    config = replace(config, model=replace(config.model, model_name_or_path=name))
    source = find_model(name)
    config = _resolved(config, source)
    return CheckedOptions(config, source, read_deepspeed_json(config.parallel.deepspeed_config))


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


def _resolved(config: TrainerConfig, source: ModelSource) -> TrainerConfig:
    """With the adapter's settings and the DeepSpeed JSON; refuses what cannot be trained."""
    check_adapter_files(source)
    check_task(source, ("CAUSAL_LM",))
    lora = continued_lora(config.lora, source, config.given)
    check_lora_options(lora, config.given)
    size = config.parallel.tensor_parallel_size
    check_processes(size, launched_processes())
    check_training(config.model, lora, size)
    check_divided(source, config.parallel)
    bits = settled_base_bits(
        config.model.base_bits, source, lora, trains=True, tensor_parallel_size=size
    )
    option = "gradient_checkpointing"
    switches = recomputing(config.parallel, {option: config.model.gradient_checkpointing})
    model = replace(config.model, base_bits=bits, gradient_checkpointing=switches[option])
    model, batch, optim, parallel = reconcile(
        model,
        config.batch,
        config.optim,
        config.parallel,
        given=config.given,
        world_size=launched_processes(),
    )
    return replace(config, model=model, lora=lora, batch=batch, optim=optim, parallel=parallel)
