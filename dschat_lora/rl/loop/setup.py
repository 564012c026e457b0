"""Setup of step 3: prompts, roles and engines of two trained models, and their record."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dschat_lora.config.data import DataConfig
from dschat_lora.data.encoder import describe_tokenizer
from dschat_lora.data.prepare import Prepared
from dschat_lora.engine.distributed import data_rank
from dschat_lora.lora.layers import value_bytes
from dschat_lora.lora.rates import ruled_rates
from dschat_lora.models.build import AdaptedModel, as_trained
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.models.loading import Tokenizer, attention_note, load_config, load_tokenizer
from dschat_lora.models.option_checks import position_limit
from dschat_lora.perf.cards import USABLE
from dschat_lora.rl.draw.player import AsksForColumns, OneTurn, Player
from dschat_lora.rl.learn.reference import ActorAsItWas, Answers, Reference
from dschat_lora.rl.learn.roles import Models, Roles, build_roles, check_layers, role_settings
from dschat_lora.rl.loop.memory import (
    Costs,
    memory_plan,
    plan_costs,
    rollout_words,
    trained_models,
)
from dschat_lora.rl.loop.validation import fit_lengths
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import Sources, find_sources, other_tokenizer, text_data
from dschat_lora.rl.options.role_config import option_errors_for
from dschat_lora.rl.score.scores import Scoring, load_scoring
from dschat_lora.runtime.graphs import launches_note
from dschat_lora.runtime.memory import GIB, explaining_memory, free_memory, peak_here
from dschat_lora.runtime.micro_batches import StepCosts, resolve_step
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import (
    builds_shapes_alone,
    check_same_models,
    engine_words,
    note_all_weights,
    num_elements,
    prepare_to_compile,
    read_data,
    read_training_data,
    record_models,
    say_coverage,
    state_identity,
    tensor_group,
    trained_elements,
)


@dataclass(frozen=True)
class RlhfData:
    """What a run reads."""

    prompts: Prepared
    text: Prepared | None  # pretraining text to mix in
    answers: Answers | None  # to learn from beside those that are drawn


@dataclass(frozen=True)
class RlhfSetup:
    """Data, models and functions of a run, before the engines."""

    run: OpenRun[RlhfConfig]
    tokenizer: Tokenizer
    data: RlhfData
    models: Models
    costs: Costs
    scoring: Scoring
    reference: Reference
    player: Player  # of the rollouts
    engine_started: Any  # what the rollout engine needs to have before models take memory
    identity: dict[str, Any] = field(default_factory=dict)  # what the run's state belongs to

    @property
    def config(self) -> RlhfConfig:
        """The run's options, as models and data made them."""
        return self.run.config


def set_up(run: OpenRun[RlhfConfig]) -> RlhfSetup:
    """Prompts and roles, shown and recorded; call on every rank.

    Raises:
        ValueError: if data, a model or a function cannot be used.
    """
    config = run.config
    if config.load.compile:
        prepare_to_compile(run)
    sources = find_sources(config)
    check_same_models(sources.by_role)
    config = _with_fitting_lengths(config, sources)
    group = tensor_group(config.parallel)
    check_layers(config, sources, group)
    config = _with_ruled_rates(config, sources, run)
    tokenizer = _load_tokenizer(config, sources)
    reference: Reference = ActorAsItWas()
    if (own := config.reference) is not None:
        reference = cast(Reference, own.load(config, tokenizer, sources, run))
    player: Player = OneTurn()
    for playing in config.players:
        player = playing.player(config, tokenizer, run.closing)
    scoring = load_scoring(config, tokenizer, episodes=player.reward_name, beside=player.beside)
    asking = [*player.asks, *scoring.asks]
    data = _read_data(config, tokenizer, run, reference, asking, sources.actor.base)
    started = config.batch.engine.prepare(config, sources, run)
    settings, free = role_settings(config), free_memory()
    roles = build_roles(
        config,
        sources=sources,
        tokenizer=tokenizer,
        dtype=settings["actor"].torch_dtype,
        group=group,
        meta=builds_shapes_alone(config.run, settings.values()),
    )
    roles.take(data.prompts.media, sources)
    config = _resolve_step(config, roles, run, free=free)
    models = Models(sources, roles, role_settings(config))
    config, costs = plan_costs(config, models, free=free)
    run = replace(run, config=config)
    setup = RlhfSetup(run, tokenizer, data, models, costs, scoring, reference, player, started)
    _describe(setup)
    if run.directory is not None:
        run.closing.enter_context(
            explaining_memory(run.directory, costs.plan, "rl_memory", config, costs.plan)
        )
        setup = replace(setup, identity=_identity(setup))
        models.shard()
    return setup


def _read_data(
    config: RlhfConfig,
    tokenizer: Tokenizer,
    run: OpenRun[RlhfConfig],
    reference: Reference,
    asking: Iterable[AsksForColumns],
    base: str,
) -> RlhfData:
    """The data of the options, of which the prompts have the columns that ``asking`` needs."""
    own = config.data.data
    prompts = read_training_data(own, tokenizer, run, phase=3, kind="prompts", base=base)
    columns = {*json.loads(prompts.train[0].columns or b"{}")}
    for each in asking:
        each.check_columns(columns)

    def read(data: DataConfig, name: str, remedy: str) -> Prepared:
        prepared = read_data(data, tokenizer, run, phase=3, kind="samples", name=name)
        if prepared.audit.supervised_tokens == 0:
            raise ValueError(remedy)
        return prepared

    text, name = None, config.pretraining.unsupervised_dataset_name
    if (data := text_data(config)) is not None:
        # Of text nothing is learnt about where answers end: it may be cut.
        remedy = f"--unsupervised_dataset_name {name} holds no text to learn from"
        text = read(data, "pretraining text", remedy)
    return RlhfData(prompts, text, reference.answers(read))


def _with_fitting_lengths(config: RlhfConfig, sources: Sources) -> RlhfConfig:
    """With lengths that the models have positions for; those of the hub are known only here."""
    limits = []
    for role, source in sources.by_role.items():
        with option_errors_for(role):
            model = as_trained(config.of_role(role).model(config.load), source)
            limits.append(position_limit(load_config(source.base, model).to_dict(), {}))
    return fit_lengths(config, limits)


def _with_ruled_rates(config: RlhfConfig, sources: Sources, run: OpenRun[RlhfConfig]) -> RlhfConfig:
    """With rates by published rules for roles whose ``learning_rate`` is auto; shown, recorded."""
    roles = {"actor": config.actor, "critic": config.critic}
    for role, options in config.trained.items():
        if options.learning_rate != "auto":
            continue
        source = sources.by_role.get(role, sources.actor)
        model = load_config(source.base, options.model(config.load))
        lora = options.lora(config.classic.only_optimize_lora)
        stage, factor = (config.stage, None) if (o := config.reference) is None else o.rates
        size = model.hidden_size
        rates = ruled_rates(model.model_type, size, stage=stage, factor=factor, lora=lora)
        typed = f"{role}_lora_learning_rate" in config.given
        adapter = options.lora_learning_rate if typed else rates.adapter
        roles[role] = replace(options, ruled=(rates.base, adapter))
        rate = adapter if lora.lora_dim else rates.base
        run.log.say(f"  rate         {role} {rate:.3g} by auto: {rates.reason}")
        run.record.update({"rates": {role: each.ruled for role, each in roles.items()}})
    return replace(config, actor=roles["actor"], critic=roles["critic"])


def _load_tokenizer(config: RlhfConfig, sources: Sources) -> Tokenizer:
    """The actor's tokenizer; refuses a role that was trained with another."""

    def rules(of: Tokenizer) -> dict[str, Any]:
        # How chats are written and in which class is no matter of tokens.
        left_out = ("chat_template", "class")
        return {k: v for k, v in describe_tokenizer(of).items() if k not in left_out}

    with option_errors_for("actor"):
        tokenizer = load_tokenizer(sources.actor.tokenizer, config.actor.model(config.load))
    for role, source in sources.by_role.items():
        with option_errors_for(role):
            other = load_tokenizer(source.tokenizer, config.of_role(role).model(config.load))
        if rules(other) != rules(tokenizer):
            raise ValueError(other_tokenizer(config, role))
    return tokenizer


def _resolve_step(
    config: RlhfConfig, roles: Roles, run: OpenRun[RlhfConfig], *, free: int
) -> RlhfConfig:
    """The config with micro-batches and each role's recomputation settled, as the models do."""

    def need(config: RlhfConfig) -> int | None:
        plan = memory_plan(config, roles, role_settings(config))
        return None if plan is None else plan.updating

    costs = StepCosts[RlhfConfig](
        need=need,
        trained=lambda config: trained_models(config, roles, role_settings(config)).values(),
        load=config.load,
        peak=peak_here(role_settings(config)["actor"].torch_dtype),
        budget=USABLE * free,
    )
    trained = {role: model.model for role, model in roles.trained.items()}
    # The critic first: it is the smaller one as a rule, and costs less to compute again.
    order = [role for role in ("critic", "actor") if role in trained]
    models = {f"{role}_gradient_checkpointing": trained[role] for role in order}
    return resolve_step(run, models, config, costs, free=free)


def _describe(setup: RlhfSetup) -> None:
    """Show and record what trains, on what, and the memory it takes."""
    roles, settings, run = setup.models.roles, setup.models.settings, setup.run
    actor = settings["actor"]
    total = num_elements(roles.whole().parameters())  # each shared one once
    trained = {name: trained_elements(m.model) for name, m in roles.trained.items()}
    counts = ", ".join(f"{name} {count:,}" for name, count in trained.items())
    run.log.say(
        f"  parameters   {total:,} in memory for {' + '.join(roles.models)}; trained: {counts}; "
        f"{engine_words(actor, roles.actor.model)}"
    )
    notes = (attention_note(each.model, run.config.load) for each in roles.models.values())
    for note in sorted(set(filter(None, notes))):
        run.log.say(f"  note         {note}")
    say_coverage(run, {n: each.model for n, each in roles.models.items()}, roles.trained)
    for role, model in roles.trained.items():
        if run.config.run.merge_adapter:
            from dschat_lora.lora.merge import check_mergeable

            check_mergeable(model.model)
        for fact in model.facts():
            run.log.say(f"  {fact}")
        options = run.config.trained[role]
        if options.lora_dim == 0:
            note_all_weights(run, f"{role}_lora_dim")
        size = num_elements(model.model.parameters())
        if warning := options.rate_warning(size, given=run.config.given):
            run.log.say(f"  warning      {warning}")
    _describe_memory(setup)
    for role, each in trained_models(run.config, roles, settings).items():
        recorded = role in setup.costs.recorded
        if words := launches_note(each, run.config.load, recorded=recorded):
            run.log.say(f"  note         {role}: {words}")
    parameters = {"total": total, "trainable": sum(trained.values()), **trained}
    record_models(run, actor, parameters=parameters, layers=roles.actor.targets)


def _describe_memory(setup: RlhfSetup) -> None:
    """Show and record the memory it takes, and what of it decodes."""
    costs, roles, run = setup.costs, setup.models.roles, setup.run
    if costs.plan is not None:
        run.log.say(f"  {costs.plan.line()}")
        run.record.update({"memory": costs.plan.to_dict()})
    if setup.config.batch.rows_that_fit is not None:
        run.log.say(f"  rollouts     {rollout_words(setup.config, costs.plan, roles.actor.model)}")
    if costs.unpacked is not None:
        size = f"{value_bytes(roles.rollout.parameters()) / GIB:.3g} GiB"
        how = f"layer by layer; {size} for all would not fit"
        if costs.unpacked:
            how = f"once for each, into {size}"
        run.log.say(f"  note         rollouts: 4-bit weights are unpacked {how}")


def _identity(setup: RlhfSetup) -> dict[str, Any]:
    """What the run's state belongs to; complete on rank 0. On every rank."""
    if data_rank() != 0:
        return {}
    roles, data, actor = setup.models.roles, setup.data, setup.models.settings["actor"]

    def fingerprint(role: AdaptedModel | None) -> str:
        if role is None:
            return ""
        return f"{base_fingerprint(role.model)} {adapter_fingerprint(role.model)}"

    identity = state_identity(roles.actor, setup.tokenizer, data.prompts, actor) | {
        "critic": fingerprint(roles.reward or roles.critic) or None,
        "text": None if data.text is None else data.text.train.identity,
        "rows": len(data.prompts.train),
    }
    if setup.config.reference is not None:
        identity |= setup.reference.identity(fingerprint(roles.reference))
    if data.answers is not None:
        identity["answers"] = data.answers.prepared.train.identity
    return identity
