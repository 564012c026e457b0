"""Validation of the supervised stages: the checks of steps 1, 2 and DPO, in their order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dschat_lora.config.addons import through_addons
from dschat_lora.config.options import command_line, flatten
from dschat_lora.config.stages import (
    LOSSES_OF_OPTION,
    SIMPO_BETA,
    DpoConfig,
    DpoStageConfig,
    SupervisedConfig,
)
from dschat_lora.config.values import parse_rope_scaling
from dschat_lora.config.verbs import GenerateConfig, ReadingConfig
from dschat_lora.data.media import media_reader
from dschat_lora.data.rows import DataKind, check_some_prompt_fits, check_sources
from dschat_lora.data.sources import find_source
from dschat_lora.data.templates import read_chat_template
from dschat_lora.engine.ds_config import reconcile
from dschat_lora.models.option_checks import (
    check_divided_rows,
    check_processes,
    check_training,
    original_positions,
    position_limit,
)
from dschat_lora.models.source import ModelSource, find_model, trained_rope
from dschat_lora.report.terminal import say_once
from dschat_lora.runtime.checks import (
    Check,
    apply_checks,
    check_adapter_files,
    check_bundled_data_fits,
    check_compile,
    check_divided,
    check_lora_options,
    check_task,
    continued_lora,
    model_fields,
    model_name,
    note_without_effect,
    recomputing,
    resolve_stage,
    settled_base_bits,
    with_bundled,
)
from dschat_lora.runtime.directory import (
    check_file_can_be_made,
    check_output_dir,
    check_source_is_kept,
)
from dschat_lora.runtime.resume import launched_processes

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)

# Rows of the bundled data are short; longer packed rows would leave few optimizer steps.
BUNDLED_SEQ_LEN = 128


@dataclass(frozen=True)
class StageRules:
    """Requirements of a stage on its options."""

    name: str  # as in its default output directory
    kind: DataKind = "samples"
    tasks: tuple[str, ...] = ("CAUSAL_LM",)  # kinds of model whose adapters it continues
    checks: tuple[Check[Any, ModelSource], ...] = ()  # its own, which come first


SFT = StageRules("sft")
REWARD = StageRules("reward", "pairs", ("CAUSAL_LM", "SEQ_CLS"))
DPO = StageRules("dpo", "pairs")


def check_supervised(config: ConfigT, *, rules: StageRules = SFT) -> ConfigT:
    """The config of step 1, 2 or DPO with paths, bundled defaults and the DeepSpeed JSON applied.

    Where a run is resumed, see :func:`dschat_lora.runtime.checks.resolve_stage`.

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """

    def check(config: ConfigT) -> ConfigT:
        # In this order: the first that fails is what a user reads.
        source = find_model(config.model.model_name_or_path)
        config = apply_checks(config, source, rules.checks)
        asked = config.data.data_path
        check_adapter_files(source)
        check_task(source, rules.tasks)
        config = with_bundled_data(config)
        config = with_adapter_and_base(config, source)
        if isinstance(config, DpoStageConfig):
            config = replace(config, dpo=checked_dpo(config))
        rope = config.model.rope_scaling
        length = fitting_length(config.data.max_seq_len, source, config.given, rope_scaling=rope)
        config = replace(config, data=replace(config.data, max_seq_len=length))
        check_budget(config)
        bundled = config.data.data_path != asked
        if bundled:
            check_bundled_data_fits(source, stage=rules.name)
        config = through_addons(config, "before_data")
        check_data(config, rules, source)
        config = through_addons(with_recomputation(with_deepspeed_json(config)), "check")
        check_output_dir(config, None)
        check_source_is_kept(config.run, source)
        announce(config, source, bundled=bundled)
        return config

    return resolve_stage(config, check, stage=rules.name)


def check_reward(config: ConfigT) -> ConfigT:
    """:func:`check_supervised` of step 2."""
    return check_supervised(config, rules=REWARD)


def check_dpo(config: ConfigT) -> ConfigT:
    """:func:`check_supervised` of DPO."""
    return check_supervised(config, rules=DPO)


def check_reading(config: ReadingConfig, tasks: tuple[str, ...]) -> ModelSource:
    """The model's source; refuses one of another kind, and a chat template that is none."""
    source = find_model(config.model_name_or_path)
    check_adapter_files(source)
    check_task(source, tasks)
    settled_base_bits(config.loading.base_bits, source)
    rope, given = source.rope_scaling, frozenset({"max_seq_len"})
    fitting_length(config.max_seq_len, source, given, rope_scaling=rope)
    if config.loading.chat_template is not None:
        read_chat_template(config.loading.chat_template)
    return source


def check_generate(config: GenerateConfig) -> None:
    """Refuse a model that answers nothing, and files that cannot be read or written."""
    check_reading(config, ("CAUSAL_LM",))
    for entry in config.data_path:
        find_source("data_path", entry)  # of any kind: each row has a prompt
    through_addons(config, "check")
    if config.output_path is not None:
        check_file_can_be_made(config.output_path, "output_path")


def with_bundled_data(config: ConfigT) -> ConfigT:
    """With the bundled rows where the user names none that the stage uses."""
    data = config.data
    if "sft_only_data_path" in config.when:
        data = replace(data, sft_only_data_path=())
    if not (data.data_path or data.sft_only_data_path):
        data = with_bundled(data, config.given, max_seq_len=BUNDLED_SEQ_LEN)
    return replace(config, data=data)


def with_adapter_and_base(config: ConfigT, source: ModelSource) -> ConfigT:
    """With what the model's files settle: the adapter that goes on, and the bits of the base.

    Raises:
        ValueError: if options contradict them or each other, or --tensor_parallel_size does not
            fit processes, training or the model.
    """
    lora = continued_lora(config.lora, source, config.given)
    check_lora_options(lora, config.given)
    size = config.parallel.tensor_parallel_size
    bits = settled_base_bits(
        config.model.base_bits,
        source,
        lora,
        trains=config.optim.num_train_epochs > 0,
        tensor_parallel_size=size,
    )
    rope = trained_rope(config.model.rope_scaling, source)
    model = replace(config.model, base_bits=bits, rope_scaling=rope)
    config = replace(config, lora=lora, model=model)
    check_processes(config.parallel, launched_processes())
    check_training(config.model, lora, size)
    check_divided(source, config.parallel)
    check_divided_rows(config.model, model_fields(source), config.parallel.context_parallel_size)
    return config


def checked_dpo(config: DpoStageConfig) -> DpoConfig:
    """The options of the loss, with the published beta of SimPO where none is given.

    Raises:
        ValueError: at an option that the loss has no use for, or if the reference would have to be
            a second model.
    """
    values, dpo = flatten(config), config.dpo
    for name, losses in LOSSES_OF_OPTION.items():
        is_off = values[name] == 0 and not isinstance(values[name], bool)
        if name in config.given and dpo.loss_type not in losses and not is_off:
            typed = " ".join(command_line({name: values[name]}))
            allowed = " or ".join([", ".join(losses[:-1])] * (len(losses) > 1) + [losses[-1]])
            raise ValueError(f"{typed} is for --loss_type {allowed}, not {dpo.loss_type}")
    adapter_alone = config.lora.lora_dim > 0 and config.lora.only_optimize_lora
    if not (dpo.precompute_ref_log_probs or adapter_alone):
        raise ValueError(
            "--no-precompute_ref_log_probs looks through the starting adapter on the frozen base; "
            "with base weights that train use --precompute_ref_log_probs"
        )
    if dpo.loss_type == "simpo" and "beta" not in config.given:
        return replace(dpo, beta=SIMPO_BETA)
    return dpo


def fitting_length(
    length: int,
    source: ModelSource,
    given: frozenset[str],
    *,
    fields: Mapping[str, Any] | None = None,
    rope_scaling: str | None = None,
) -> int:
    """``length`` or, unless the user chose it, what the model's positions allow.

    ``fields`` are those of its configuration; a local one's are read where they are absent.
    """
    fields = model_fields(source) if fields is None else fields
    try:
        limit = position_limit(fields, parse_rope_scaling(rope_scaling)) or length
    except ValueError as error:
        path = Path(source.base) / "config.json"
        raise ValueError(f"--model_name_or_path: {path}: {error}") from error
    if length > limit and "max_seq_len" in given:
        rotates = any(fields.get(name) for name in ("rope_theta", "rope_parameters"))
        factor = math.ceil(length / (original_positions(fields) or limit))
        more = f"""; --rope_scaling '{{"rope_type": "yarn", "factor": {factor}}}' reaches them"""
        raise ValueError(
            f"--max_seq_len is {length}, but the model has {limit} positions{more * rotates}"
        )
    return min(length, limit)


def check_budget(config: SupervisedConfig) -> None:
    """Refuse micro-batches of so many tokens that are of so many rows too, or hold no row."""
    tokens, rows = config.batch.tokens_per_device, config.batch.per_device_train_batch_size
    if tokens and "per_device_train_batch_size" in config.given:
        raise ValueError(
            f"--tokens_per_device {tokens} and --per_device_train_batch_size {rows} both say what "
            "a micro-batch holds; give one"
        )
    longest, length = config.max_row_tokens, config.data.max_seq_len
    if tokens and tokens < longest:
        both = ", twice that for a pair" if longest > length else ""
        raise ValueError(
            f"--tokens_per_device {tokens} is less than a row may take with --max_seq_len "
            f"{length}{both}; give {longest} or more, or lower --max_seq_len"
        )


def check_data(config: SupervisedConfig, rules: StageRules, source: ModelSource) -> None:
    """Refuse data that cannot be read as the stage reads it, or a chat template that is none."""
    if config.model.chat_template is not None:
        read_chat_template(config.model.chat_template)
    unpaired = isinstance(config, DpoStageConfig) and config.dpo.is_unpaired
    kind = "unpaired" if unpaired else rules.kind
    check_sources(config.data, kind, media_reader(config, None, source.base))
    if config.optim.num_train_epochs > 0:
        check_some_prompt_fits(config.data, source.tokenizer)


def with_deepspeed_json(config: ConfigT) -> ConfigT:
    """With what ``--deepspeed_config`` says where no option was given; not compiled at ZeRO 3."""
    model, batch, optim, parallel = reconcile(
        config.model,
        config.batch,
        config.optim,
        config.parallel,
        given=config.given,
        world_size=launched_processes(),
    )
    check_compile(config.model, parallel.zero_stage)
    return replace(config, model=model, batch=batch, optim=optim, parallel=parallel)


def with_recomputation(config: ConfigT) -> ConfigT:
    """With blocks recomputed whose inputs are to be on the host."""
    name = "gradient_checkpointing"
    switch = recomputing(config.parallel, {name: config.model.gradient_checkpointing})[name]
    return replace(config, model=replace(config.model, gradient_checkpointing=switch))


def announce(config: SupervisedConfig, source: ModelSource, *, bundled: bool) -> None:
    """Log model and data in the first line, and a note on each option that changes nothing."""
    paths = "the bundled data" if bundled else " ".join(config.data.data_path)
    more = " ".join(config.data.sft_only_data_path)
    say_once(f"model: {model_name(source)}; data: {paths} {more}".rstrip())
    note_without_effect(config)
