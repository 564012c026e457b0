"""Checks of what stages have in common: the models of their roles, data, processes and output.

As in :mod:`dschat_lora.runtime.checks`, a check returns the config with something resolved, or
None. A stage lists its own among these, in the order in which a user reads what is wrong.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dschat_lora.config.addons import through_addons
from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.options import option_names, with_values
from dschat_lora.config.roles import MODEL
from dschat_lora.config.stages import StageConfig, SupervisedConfig, too_long
from dschat_lora.config.values import parse_rope_scaling
from dschat_lora.config.verbs import GenerateConfig, ReadingConfig
from dschat_lora.data.sources import find_source
from dschat_lora.data.templates import read_chat_template
from dschat_lora.engine.ds_config import stated_values
from dschat_lora.models.option_checks import (
    check_divided_rows,
    check_processes,
    check_training,
    original_positions,
    position_limit,
)
from dschat_lora.models.source import ModelSource, find_model, trained_rope
from dschat_lora.runtime.checks import (
    Check,
    apply_checks,
    check_adapter_files,
    check_compile,
    check_divided,
    check_lora_options,
    check_task,
    continued_lora,
    find_of_kind,
    model_fields,
    recomputing,
    resolve_stage,
    settled_base_bits,
)
from dschat_lora.runtime.directory import check_file_can_be_made, check_source_is_kept
from dschat_lora.runtime.resume import launched_processes

StageT = TypeVar("StageT", bound=StageConfig)
ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


@dataclass(frozen=True)
class Sources:
    """Where the models of a run come from: those that options name, by role."""

    by_role: Mapping[str, ModelSource]

    def of(self, role: str) -> ModelSource:
        """What a role starts from: its own or, as a critic may, that of the first."""
        return self.by_role.get(role) or next(iter(self.by_role.values()))


@dataclass(frozen=True)
class Inputs:
    """Inputs of the checks besides the config: the models found, and the data as typed."""

    sources: Sources
    asked: tuple[str, ...]


def check_stage(
    config: StageT,
    checks: Iterable[Check[StageT, Inputs]],
    find_sources: Callable[[StageT], Sources],
) -> StageT:
    """The config of a stage after its checks; see :func:`resolve_stage` of one that is resumed.

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """

    def check(config: StageT) -> StageT:
        sources = find_sources(config)
        config = through_addons(config, "with_data")  # rows that one makes
        return apply_checks(config, Inputs(sources, config.data.data_path), checks)

    return resolve_stage(config, check, stage=config.stage)


def with_continued_adapters(config: StageT, inputs: Inputs) -> StageT:
    """With the settings of the adapters that are continued; refuses options that contradict."""
    for name, role in config.roles.items():
        with config.naming_options_of(name):
            given = role.typed(config.given)
            lora = continued_lora(role.lora, inputs.sources.of(name), given)
        values = {role.prefix + option: value for option, value in vars(lora).items()}
        config = with_values(config, values)
    return config


def with_fitting_lengths(config: StageT, inputs: Inputs) -> StageT:
    """With lengths that local models have positions for; longer ones are refused if typed."""

    def read(source: ModelSource, model: ModelConfig) -> tuple[dict[str, Any], str | None]:
        return model_fields(source), trained_rope(model.rope_scaling, source)

    return fit_lengths(config, inputs.sources, read)


def fit_lengths(
    config: StageT,
    sources: Sources,
    read: Callable[[ModelSource, ModelConfig], tuple[Mapping[str, Any], str | None]],
) -> StageT:
    """With lengths that the models of all roles have positions for.

    ``read`` gives the configuration of a model, and ``--rope_scaling`` if that is not part of it.

    Raises:
        ValueError: if longer ones were typed.
    """
    for name, source in sources.by_role.items():
        model = config.model_of(name)
        with config.naming_options_of(name):
            fields, rope = read(source, model)
            limit = _positions(source, fields, rope)
        try:
            config = config if limit is None else config.fitted(limit)
        except ValueError as error:
            reaches = "rope_scaling" in option_names(type(config))
            reach = _reach(fields, config.data.max_seq_len) if reaches else ""
            raise ValueError(f"{error}{reach}") from error
    return config


def _positions(source: ModelSource, fields: Mapping[str, Any], rope: str | None) -> int | None:
    """Positions that a model has; None where its configuration does not say."""
    try:
        return position_limit(fields, parse_rope_scaling(rope))
    except ValueError as error:
        path = Path(source.base) / "config.json"
        raise ValueError(f"--model_name_or_path: {path}: {error}") from error


def _reach(fields: Mapping[str, Any], length: int) -> str:
    """By which option rotary embeddings reach a length; empty for embeddings that are learnt."""
    if not any(fields.get(name) for name in ("rope_theta", "rope_parameters")):
        return ""
    factor = math.ceil(length / (original_positions(fields) or length))
    return f"""; --rope_scaling '{{"rope_type": "yarn", "factor": {factor}}}' reaches them"""


def with_base_bits(config: StageT, inputs: Inputs) -> StageT:
    """With the bits of the bases, where those of all roles are the same."""
    of_roles = set()
    for name, role in config.trained.items():
        with config.naming_options_of(name):
            bits = settled_base_bits(
                config.load.base_bits,
                inputs.sources.of(name),
                role.lora,
                trains=config.optim.num_train_epochs > 0,
                tensor_parallel_size=config.parallel.tensor_parallel_size,
            )
        of_roles.add(bits)
    return with_values(config, {"base_bits": bits}) if len(of_roles) == 1 else config


def check_parallel(config: StageConfig, inputs: Inputs) -> None:
    """Refuse models that the processes cannot divide, or cannot train once they are divided."""
    check_processes(config.parallel, launched_processes())
    for name, role in config.trained.items():
        with config.naming_options_of(name):
            check_training(config.load, role.lora, config.parallel.tensor_parallel_size)
    for name, source in inputs.sources.by_role.items():
        with config.naming_options_of(name):
            check_divided(source, config.parallel)


def with_deepspeed_json(config: StageT, inputs: object = None) -> StageT:
    """With what ``--deepspeed_config`` says where no option was given; not compiled at ZeRO 3."""
    batch, counts_tokens = config.batch, config.micro_batch not in config.rows["rows_per_step"]
    values = stated_values(
        config.load,
        {n: getattr(batch, n) for n in (config.micro_batch, "gradient_accumulation_steps")},
        config.optim,
        config.parallel,
        given=config.given,
        world_size=launched_processes(),
        tokens_per_device=batch.tokens_per_device if counts_tokens else 0,
    )
    for role in config.roles.values():
        if role.zero_stage is None:
            values[f"{role.prefix}zero_stage"] = values["zero_stage"]
    config = with_values(config, values)
    check_compile(config.load, *(role.zero_stage for role in config.roles.values()))
    return config


def with_recomputation(config: StageT, inputs: object = None) -> StageT:
    """With blocks recomputed whose inputs are to be on the host."""
    typed = {
        f"{role.prefix}gradient_checkpointing": role.model.gradient_checkpointing
        for role in config.trained.values()
    }
    return with_values(config, recomputing(config.parallel, typed))


def check_sources_are_kept(config: StageConfig, inputs: Inputs) -> None:
    """Refuse to overwrite a directory that a model comes from."""
    for name, source in inputs.sources.by_role.items():
        with config.naming_options_of(name):
            check_source_is_kept(config.run, source)


def find_model_of(config: SupervisedConfig) -> Sources:
    """The model of the options, of a kind that the stage continues."""
    name = config.model.model_name_or_path
    return Sources({MODEL: find_of_kind(name, config.starts_from, option="--model_name_or_path")})


def with_trained_rope(config: ConfigT, inputs: Inputs) -> ConfigT:
    """With the rotation that the adapter was trained on; refuses rows divided over another."""
    source = inputs.sources.of(MODEL)
    rope = trained_rope(config.model.rope_scaling, source)
    config = replace(config, model=replace(config.model, rope_scaling=rope))
    check_divided_rows(config.model, model_fields(source), config.parallel.context_parallel_size)
    return config


# What the model's files settle: the adapter that goes on, the bits and the rotation of the base.
MODEL_CHECKS: tuple[Check[Any, Inputs], ...] = (
    with_continued_adapters,
    lambda config, _: check_lora_options(config.lora, config.given),
    with_base_bits,
    check_parallel,
    with_trained_rope,
)


def check_reading(config: ReadingConfig, tasks: tuple[str, ...]) -> ModelSource:
    """The model's source; refuses one of another kind, and a chat template that is none."""
    source = find_model(config.model_name_or_path)
    check_adapter_files(source)
    check_task(source, tasks)
    settled_base_bits(config.loading.base_bits, source)
    fields = model_fields(source)
    limit = _positions(source, fields, source.rope_scaling)
    if limit is not None and config.max_seq_len > limit:
        raise ValueError(too_long(config.max_seq_len, limit) + _reach(fields, config.max_seq_len))
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
