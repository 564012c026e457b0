"""What every stage sets up before it trains: data, model, engine, and their record."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import flatten
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.engine.build import EngineSettings, TrainEngine
from dschat_lora.engine.distributed import (
    data_rank,
    device,
)
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.rates import parameter_groups, rate_warning
from dschat_lora.models.build import (
    AdaptedModel,
    Task,
    can_recompute,
    check_targets,
    recompute_blocks,
)
from dschat_lora.models.causal_lm import Tokenizer, load_tokenizer
from dschat_lora.models.compile import compile_blocks
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.models.views import ModuleT
from dschat_lora.runtime.memory import (
    estimate_memory_of,
    explaining_memory,
    free_memory,
    settle_recomputation,
)
from dschat_lora.runtime.run import Run
from dschat_lora.runtime.setup import (
    engine_settings,
    prepare_to_compile,
    process_words,
    read_data,
    shard_model,
    state_identity,
    tensor_group,
    zero_words,
)


@dataclass(frozen=True)
class Setup:
    """A stage with its data and its model, before the engine."""

    config: SupervisedConfig
    source: ModelSource
    tokenizer: Tokenizer
    data: Prepared
    settings: EngineSettings
    adapted: AdaptedModel
    identity: dict[str, Any]
    run: Run[SupervisedConfig]


class Build(Protocol):
    """Builds a stage's model; see :func:`dschat_lora.models.build.build_causal_lm`."""

    def __call__(
        self,
        source: ModelSource,
        tokenizer: Tokenizer,
        config: ModelConfig,
        lora: LoraConfig,
        *,
        dtype: torch.dtype,
        seed: int,
        meta: bool,
        group: TensorGroup | None,
    ) -> AdaptedModel:
        """The model with its adapter."""


def set_up(
    run: Run[SupervisedConfig], build: Build, *, phase: int, kind: DataKind = "samples", task: Task
) -> Setup:
    """Data and model of a stage, shown and recorded; call on every rank.

    Args:
        run: of the run.
        build: of the model.
        phase: 1, 2 or 3, the part of ``--data_split`` to use.
        kind: what is made of a row of data.
        task: what kind of model is built.

    Raises:
        ValueError: if data or model cannot be used.
    """
    config = run.config
    if config.model.attn_implementation == "flex_attention" and device().type == "cpu":
        raise ValueError(
            "--attn_implementation flex_attention trains on a GPU only; use sdpa or eager on a CPU"
        )
    if config.model.compile:
        prepare_to_compile(run)
    source = find_model(config.model.model_name_or_path)
    group = tensor_group(config.parallel)
    check_targets(source, config.model, config.lora, task, group=group)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    data = prepare_data(config, tokenizer, phase=phase, kind=kind, run=run)
    settings = engine_settings(
        config,
        dtype=config.model.dtype,
        zero_stage=config.parallel.zero_stage,
        micro_batch_size=config.batch.per_device_train_batch_size,
    )
    free = free_memory()
    adapted = build(
        source,
        tokenizer,
        config.model,
        config.lora,
        dtype=settings.torch_dtype,
        seed=config.run.seed,
        meta=wants_shape_only(config, settings),
        group=group,
    )
    config = settle_memory(config, settings, adapted, run, free=free)
    run = replace(run, config=config)
    describe(config, settings, adapted, run)
    identity: dict[str, Any] = {}
    if run.directory is not None:
        run.closing.enter_context(explaining_memory(adapted, config, settings, run.directory))
        identity = state_identity(adapted, tokenizer, data, settings)
        shard_model(adapted.model, settings)
    return Setup(config, source, tokenizer, data, settings, adapted, identity, run)


def settle_memory(
    config: SupervisedConfig,
    settings: EngineSettings,
    adapted: AdaptedModel,
    run: Run[SupervisedConfig],
    *,
    free: int,
) -> SupervisedConfig:
    """The config with ``--gradient_checkpointing`` settled, as the model then does. On every rank.

    Raises:
        ValueError: if blocks are to be recomputed, and the architecture cannot.
    """
    option = "gradient_checkpointing"

    def recomputing(on: bool) -> SupervisedConfig:
        return replace(config, model=replace(config.model, gradient_checkpointing=on))

    def need(on: Sequence[str]) -> int:
        if not can_recompute(adapted.model):
            return 0
        return estimate_memory_of(adapted, recomputing(option in on), settings) or 0

    switches = {option: config.model.gradient_checkpointing}
    on, words = settle_recomputation(config, switches, need, free=free)
    if words is not None:
        run.log.say(f"  note         {words}")
    if on[option]:
        recompute_blocks(adapted.model)
    run.record.update(on)
    return recomputing(on[option])


def prepare_data(
    config: SupervisedConfig,
    tokenizer: Tokenizer,
    *,
    phase: int,
    kind: DataKind = "samples",
    run: Run[SupervisedConfig],
) -> Prepared:
    """Tokenised rows, audited; the audit is shown and recorded. Call on every rank.

    Raises:
        ValueError: if rows cannot be read, or there is nothing to learn from them.
    """
    seed = config.run.seed
    prepared = read_data(
        config.data, tokenizer, phase=phase, seed=seed, kind=kind, name="data", run=run
    )
    if config.optim.num_train_epochs > 0:
        prepared.audit.check()
    return prepared


def note_unused_margins(setup: Setup) -> None:
    """Say that margins have no part in this stage's loss, where rows bring some."""
    if len(setup.data.train) and setup.data.train.column("margin").any():
        setup.run.log.say("  note         the column `margin` has no effect on this loss")


def wants_shape_only(config: SupervisedConfig, settings: EngineSettings) -> bool:
    """Whether this rank builds the model without its weights: they come sharded, or never."""
    return config.run.dry_run or (settings.zero_stage == 3 and data_rank() > 0)


def describe(
    config: SupervisedConfig,
    settings: EngineSettings,
    adapted: AdaptedModel,
    run: Run[SupervisedConfig],
) -> None:
    """Show and record parameter counts, compute type and ZeRO stage."""
    parameters = list(adapted.model.parameters())
    total = sum(full_shape(p).numel() for p in parameters)
    trained = sum(full_shape(p).numel() for p in parameters if p.requires_grad)
    run.log.say(
        f"  parameters   {total:,}, of which {trained:,} train ({trained / total:.2%}); "
        f"{len(adapted.targets)} adapted layers; {settings.dtype}, "
        f"{zero_words(settings, adapted.model)}, {process_words()}"
    )
    if warning := rate_warning(config.optim, config.lora):
        run.log.say(f"  warning      {warning}")
    memory = estimate_memory_of(adapted, config, settings)
    if memory is not None:
        run.log.say(
            f"  memory       up to {memory / 2**30:.3g} GiB per device by estimate, for full rows"
        )
    run.record.update(
        {
            "parameters": {"total": total, "trainable": trained},
            "dtype": settings.dtype,
            "adapted_layers": adapted.targets,
        }
    )
    if config.run.dry_run:
        for name, value in flatten(config).items():
            run.log.say(f"  --{name} {value}")
        run.log.say("dry run: nothing was trained or saved")


def build_engine(setup: Setup, network: ModuleT) -> TrainEngine[ModuleT]:
    """The engine over ``network``, which holds the stage's model; call on every rank."""
    groups = parameter_groups(setup.adapted.model, setup.config.optim)
    engine = TrainEngine(network, groups, setup.settings)
    if setup.config.model.compile:
        compile_blocks(setup.adapted.model)
    return engine
