"""Setup of step 3: prompts, roles and engines of two trained models, and their record."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from dschat_lora.config.data import DataConfig
from dschat_lora.data.encoder import describe_tokenizer
from dschat_lora.data.prepare import Prepared
from dschat_lora.engine.distributed import data_rank
from dschat_lora.lora.layers import value_bytes
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.models.loading import Tokenizer, load_tokenizer
from dschat_lora.rl.draw.player import AsksForColumns, OneTurn, Player
from dschat_lora.rl.learn.reference import ActorAsItWas, Answers, Reference
from dschat_lora.rl.learn.roles import Models, build_roles
from dschat_lora.rl.loop.memory import (
    Costs,
    memory_plan,
    plan_costs,
    rollout_words,
)
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import find_sources, other_tokenizer, text_data
from dschat_lora.rl.options.role_config import option_errors_for
from dschat_lora.rl.score.scores import Scoring, load_scoring
from dschat_lora.runtime.memory import GIB, explaining_memory, free_memory
from dschat_lora.runtime.roles import (
    check_layers,
    describe_roles,
    engines_of,
    record_memory,
    resolve_micro_batches,
    with_loaded_lengths,
    with_ruled_rates,
)
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import (
    builds_shapes_alone,
    check_same_models,
    prepare_to_compile,
    read_data,
    read_training_data,
    state_identity,
    tensor_group,
)
from dschat_lora.runtime.validation import Sources


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
    config = with_loaded_lengths(config, sources)
    group = tensor_group(config.parallel)
    check_layers(config, sources, group)
    config = with_ruled_rates(config, sources, run)
    tokenizer = _load_tokenizer(config, sources)
    reference: Reference = ActorAsItWas()
    if (own := config.reference) is not None:
        reference = cast(Reference, own.load(config, tokenizer, sources, run))
    player: Player = OneTurn()
    for playing in config.players:
        player = playing.player(config, tokenizer, run.closing)
    scoring = load_scoring(config, tokenizer, episodes=player.reward_name, beside=player.beside)
    asking = [*player.asks, *scoring.asks]
    data = _read_data(config, tokenizer, run, reference, asking, sources.of("actor").base)
    started = config.batch.engine.prepare(config, sources, run)
    settings, free = engines_of(config), free_memory()
    roles = build_roles(
        config,
        sources=sources,
        tokenizer=tokenizer,
        dtype=settings["actor"].torch_dtype,
        group=group,
        meta=builds_shapes_alone(config.run, settings.values()),
    )
    roles.take(data.prompts.media, sources)
    config = resolve_micro_batches(
        run,
        config,
        roles,
        plan=lambda config: memory_plan(config, roles),
        free=free,
    )
    models = Models(sources, roles, engines_of(config, roles))
    config, costs = plan_costs(config, models, free=free)
    run = replace(run, config=config)
    setup = RlhfSetup(run, tokenizer, data, models, costs, scoring, reference, player, started)
    describe_roles(
        run,
        roles,
        warning=lambda role, size: getattr(config, role).rate_warning(size, given=config.given),
        memory=_memory_lines(setup),
        recorded=costs.recorded,
    )
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
    prompts = read_training_data(own, tokenizer, run, base=base)
    columns = {*json.loads(prompts.train[0].columns or b"{}")}
    for each in asking:
        each.check_columns(columns)

    def read(data: DataConfig, name: str, remedy: str) -> Prepared:
        prepared = read_data(data, tokenizer, run, kind="samples", name=name)
        if prepared.audit.supervised_tokens == 0:
            raise ValueError(remedy)
        return prepared

    text, name = None, config.pretraining.unsupervised_dataset_name
    if (data := text_data(config)) is not None:
        # Of text nothing is learnt about where answers end: it may be cut.
        remedy = f"--unsupervised_dataset_name {name} contains no text to train on"
        text = read(data, "pretraining text", remedy)
    return RlhfData(prompts, text, reference.answers(read))


def _load_tokenizer(config: RlhfConfig, sources: Sources) -> Tokenizer:
    """The actor's tokenizer; refuses a role that was trained with another."""

    def rules(of: Tokenizer) -> dict[str, Any]:
        # How chats are written and in which class is no matter of tokens.
        left_out = ("chat_template", "class")
        return {k: v for k, v in describe_tokenizer(of).items() if k not in left_out}

    with option_errors_for("actor"):
        tokenizer = load_tokenizer(sources.of("actor").tokenizer, config.model_of("actor"))
    for role, source in sources.by_role.items():
        with option_errors_for(role):
            other = load_tokenizer(source.tokenizer, config.model_of(role))
        if rules(other) != rules(tokenizer):
            raise ValueError(other_tokenizer(config, role))
    return tokenizer


def _memory_lines(setup: RlhfSetup) -> Iterator[str]:
    """What the log shows of the memory the run takes, which is recorded, and of what decodes."""
    costs, roles = setup.costs, setup.models.roles
    yield from record_memory(setup.run, costs.plan)
    if setup.config.batch.rows_that_fit is not None:
        yield f"rollouts     {rollout_words(setup.config, costs.plan, roles.actor.model)}"
    if costs.unpacked is not None:
        size = f"{value_bytes(roles.rollout.parameters()) / GIB:.3g} GiB"
        how = f"layer by layer; all at once ({size}) would not fit"
        if costs.unpacked:
            how = f"once for each, into {size}"
        yield f"note         rollouts: 4-bit weights are dequantised {how}"


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
