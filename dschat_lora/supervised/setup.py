"""Setup of the supervised stages: data, model and engine of one trained model."""

from dataclasses import dataclass, replace
from typing import Any

from dschat_lora.config.addons import groups_of
from dschat_lora.config.roles import MODEL
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.engine.build import EngineSettings, TrainEngine
from dschat_lora.lora.rates import (
    parameter_groups,
    rate_warning,
)
from dschat_lora.models.blocks import FLEX_ATTENTION, compile_blocks
from dschat_lora.models.build import (
    AdaptedModel,
    attach_media,
    build_causal_lm,
    build_reward_model,
)
from dschat_lora.models.loading import (
    ModuleT,
    Tokenizer,
    load_config,
    load_tokenizer,
)
from dschat_lora.models.option_checks import check_divided_rows
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.graphs import plan_graphs, record_training
from dschat_lora.runtime.memory import (
    MemoryPlan,
    explaining_memory,
    free_memory,
    plan_memory,
)
from dschat_lora.runtime.roles import (
    OneRole,
    check_layers,
    describe_roles,
    engines_of,
    record_memory,
    resolve_micro_batches,
    trained_models,
    with_loaded_lengths,
    with_ruled_rates,
)
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import (
    builds_shapes_alone,
    check_same_models,
    prepare_to_compile,
    read_training_data,
    shard_model,
    state_identity,
    tensor_group,
)
from dschat_lora.runtime.validation import Sources


@dataclass(frozen=True)
class SupervisedSetup:
    """A stage with its data and its model, before the engine."""

    config: SupervisedConfig
    source: ModelSource
    tokenizer: Tokenizer
    data: Prepared
    settings: EngineSettings
    adapted: AdaptedModel
    identity: dict[str, Any]
    run: OpenRun[SupervisedConfig]
    recorded: bool = False  # whether passes of training run as CUDA graphs


def set_up(run: OpenRun[SupervisedConfig]) -> SupervisedSetup:
    """Data and model of a stage, shown and recorded; call on every rank.

    Raises:
        ValueError: if data or model cannot be used.
    """
    config = run.config
    if config.model.attn_implementation == "flex_attention":
        prepare_to_compile(run, FLEX_ATTENTION)
    if config.model.compile:
        prepare_to_compile(run)
    for own in groups_of(config, "before_models"):
        own.before_models()
    source = find_model(config.model.model_name_or_path)
    sources = Sources({MODEL: source})
    check_same_models(sources.by_role)
    group = tensor_group(config.parallel)
    check_layers(config, sources, group)
    config = with_loaded_lengths(config, sources)
    if (size := config.parallel.context_parallel_size) > 1:
        fields = load_config(source.base, config.model).to_dict()
        check_divided_rows(config.model, fields, size)
    config = with_ruled_rates(config, sources, run)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    data = read_training_data(config.data, tokenizer, run, base=source.base)
    settings, free = engines_of(config)[MODEL], free_memory()
    build = build_reward_model if config.task == "SEQ_CLS" else build_causal_lm
    adapted = build(
        source,
        tokenizer,
        config.model,
        config.lora,
        dtype=settings.torch_dtype,
        seed=config.run.seed,
        meta=builds_shapes_alone(config.run, [settings]),
        group=group,
    )
    attach_media(adapted, data.media)
    roles = OneRole(adapted)

    def planned(config: SupervisedConfig) -> MemoryPlan | None:
        return plan_memory([*trained_models(config, roles).values()])

    config = resolve_micro_batches(run, config, roles, plan=planned, free=free)
    run, settings = replace(run, config=config), engines_of(config)[MODEL]
    one = trained_models(config, roles)
    plan, graphs = plan_graphs(plan_memory([*one.values()]), one, config.model, free=free)
    describe_roles(
        run,
        roles,
        warning=lambda *_: rate_warning(config.optim, config.lora),
        memory=record_memory(run, plan),
        recorded=graphs,
    )
    identity: dict[str, Any] = {}
    if run.directory is not None:
        facts = (adapted, config, settings)
        run.closing.enter_context(
            explaining_memory(run.directory, plan, "supervised_memory", *facts)
        )
        identity = state_identity(adapted, tokenizer, data, settings)
        shard_model(adapted.model, settings)
    own = (config, source, tokenizer, data, settings, adapted, identity, run)
    return SupervisedSetup(*own, recorded=bool(graphs))


def note_unused_margins(setup: SupervisedSetup) -> None:
    """Say that margins have no part in this stage's loss, where rows bring some."""
    if len(setup.data.train) and setup.data.train.column("margin").any():
        setup.run.log.say("  note         this loss does not use the column `margin`")


def build_engine(setup: SupervisedSetup, network: ModuleT) -> TrainEngine[ModuleT]:
    """The engine over ``network``, which holds the stage's model; call on every rank."""
    groups = parameter_groups(setup.adapted.model, setup.config.optim)
    engine = TrainEngine(network, groups, setup.settings)
    if setup.config.model.compile:
        compile_blocks(setup.adapted.model)
    if setup.recorded:
        record_training(network, setup.adapted.model)
    return engine
