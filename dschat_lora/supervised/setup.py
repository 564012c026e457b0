"""Setup of the supervised stages: data, model and engine of one trained model."""

from dataclasses import dataclass, replace
from typing import Any

from dschat_lora.config.addons import groups_of
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.engine.build import EngineSettings, TrainEngine
from dschat_lora.lora.rates import (
    adapter_learning_rate,
    parameter_groups,
    rate_warning,
    ruled_rates,
)
from dschat_lora.models.blocks import FLEX_ATTENTION, compile_blocks
from dschat_lora.models.build import (
    AdaptedModel,
    Task,
    attach_media,
    build_causal_lm,
    build_reward_model,
    check_targets,
)
from dschat_lora.models.loading import (
    ModuleT,
    Tokenizer,
    attention_note,
    load_config,
    load_tokenizer,
)
from dschat_lora.models.option_checks import check_divided_rows
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.perf.cards import USABLE
from dschat_lora.runtime.graphs import launches_note, plan_graphs, record_training
from dschat_lora.runtime.memory import (
    MemoryPlan,
    estimate_memory_of,
    explaining_memory,
    free_memory,
    memory_plan_of,
    peak_here,
    trained_model,
)
from dschat_lora.runtime.micro_batches import StepCosts, resolve_step
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import (
    builds_shapes_alone,
    check_same_models,
    engine_settings,
    engine_words,
    note_all_weights,
    num_elements,
    prepare_to_compile,
    read_training_data,
    record_models,
    say_coverage,
    shard_model,
    state_identity,
    tensor_group,
    trained_elements,
)
from dschat_lora.runtime.validation import fitting_length


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
    phase: int  # of --data_split
    kind: DataKind
    recorded: bool = False  # whether passes of training run as CUDA graphs


def set_up(
    run: OpenRun[SupervisedConfig], *, phase: int, kind: DataKind, task: Task
) -> SupervisedSetup:
    """Data and model of a stage, shown and recorded; call on every rank.

    ``phase`` (1, 2 or 3) is the part of ``--data_split`` to use.

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
    check_same_models({"": source})
    group = tensor_group(config.parallel)
    check_targets(
        source,
        config.model,
        config.lora,
        task,
        expert_learning_rate=config.optim.expert_learning_rate,
        group=group,
    )
    config = _fitted(config, source, run)
    tokenizer = load_tokenizer(source.tokenizer, config.model)
    data = read_training_data(config.data, tokenizer, run, phase=phase, kind=kind, base=source.base)
    settings, free = model_settings(config), free_memory()
    build = build_causal_lm
    if task == "SEQ_CLS":
        build = build_reward_model
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
    costs = StepCosts[SupervisedConfig](
        need=lambda config: estimate_memory_of(adapted, config, model_settings(config)),
        trained=lambda config: [trained_model(adapted, config, model_settings(config))],
        load=config.model,
        peak=peak_here(settings.torch_dtype),
        budget=USABLE * free,
    )
    models = {"gradient_checkpointing": adapted.model}
    config = resolve_step(run, models, config, costs, free=free)
    run, settings = replace(run, config=config), model_settings(config)
    facts = (adapted, config, settings)
    one = {"model": trained_model(*facts)}
    plan, graphs = plan_graphs(memory_plan_of(*facts), one, config.model, free=free)
    _describe(run, settings, adapted, plan, recorded=bool(graphs))
    identity: dict[str, Any] = {}
    if run.directory is not None:
        run.closing.enter_context(
            explaining_memory(run.directory, plan, "supervised_memory", *facts)
        )
        identity = state_identity(adapted, tokenizer, data, settings)
        shard_model(adapted.model, settings)
    own = (config, source, tokenizer, data, settings, adapted, identity, run, phase, kind)
    return SupervisedSetup(*own, recorded=bool(graphs))


def model_settings(config: SupervisedConfig) -> EngineSettings:
    """How the engine of the model is built."""
    return engine_settings(
        config,
        dtype=config.model.dtype,
        zero_stage=config.parallel.zero_stage,
        micro_batch_size=config.batch.per_device_train_batch_size,
    )


def _fitted(
    config: SupervisedConfig, source: ModelSource, run: OpenRun[SupervisedConfig]
) -> SupervisedConfig:
    """With a length that the model has positions for, and rates by published rules if asked for.

    The rates are shown and recorded. A model of the hub is known only here.
    """
    model_config = load_config(source.base, config.model)
    fields = model_config.to_dict()
    check_divided_rows(config.model, fields, config.parallel.context_parallel_size)
    length = fitting_length(config.data.max_seq_len, source, config.given, fields=fields)
    config = replace(config, data=replace(config.data, max_seq_len=length))
    if config.optim.learning_rate != "auto":
        return config
    kind, width = model_config.model_type, model_config.hidden_size
    rates = ruled_rates(kind, width, stage=run.stage, lora=config.lora)
    optim = replace(config.optim, ruled=(rates.base, rates.adapter))
    rate = adapter_learning_rate(optim) if config.lora.lora_dim else rates.base
    run.log.say(f"  rate         {rate:.3g} by --learning_rate auto: {rates.reason}")
    run.record.update({"rates": rates._asdict()})
    return replace(config, optim=optim)


def _describe(
    run: OpenRun[SupervisedConfig],
    settings: EngineSettings,
    adapted: AdaptedModel,
    plan: MemoryPlan | None,
    *,
    recorded: bool,
) -> None:
    """Show and record parameter counts, compute type, ZeRO stage and the need of memory."""
    config, total = run.config, num_elements(adapted.model.parameters())
    trained = trained_elements(adapted.model)
    run.log.say(
        f"  parameters   {total:,}, of which {trained:,} train ({trained / total:.2%}); "
        f"{len(adapted.targets)} adapted layers; {engine_words(settings, adapted.model)}"
    )
    if config.run.merge_adapter:
        from dschat_lora.lora.merge import check_mergeable

        check_mergeable(adapted.model)
    say_coverage(run, {"model": adapted.model}, ("model",))
    for fact in adapted.facts():
        run.log.say(f"  {fact}")
    if words := attention_note(adapted.model, config.model):
        run.log.say(f"  note         {words}")
    if config.lora.lora_dim == 0:
        note_all_weights(run, "lora_dim")
    if warning := rate_warning(config.optim, config.lora):
        run.log.say(f"  warning      {warning}")
    if plan is not None:
        run.log.say(
            f"  memory       up to {plan.peak / 2**30:.3g} GiB per device by estimate, for full "
            f"rows{plan.host_words}"
        )
        run.record.update({"memory": plan.to_dict()})
    one = trained_model(adapted, config, settings)
    if words := launches_note(one, config.model, recorded=recorded):
        run.log.say(f"  note         {words}")
    parameters = {"total": total, "trainable": trained}
    record_models(run, settings, parameters=parameters, layers=adapted.targets)


def note_unused_margins(setup: SupervisedSetup) -> None:
    """Say that margins have no part in this stage's loss, where rows bring some."""
    if len(setup.data.train) and setup.data.train.column("margin").any():
        setup.run.log.say("  note         the column `margin` is not part of this loss")


def build_engine(setup: SupervisedSetup, network: ModuleT) -> TrainEngine[ModuleT]:
    """The engine over ``network``, which holds the stage's model; call on every rank."""
    groups = parameter_groups(setup.adapted.model, setup.config.optim)
    engine = TrainEngine(network, groups, setup.settings)
    if setup.config.model.compile:
        compile_blocks(setup.adapted.model)
    if setup.recorded:
        record_training(network, setup.adapted.model)
    return engine
