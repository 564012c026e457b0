"""Setup of step 3: prompts, roles and engines of two trained models, and their record."""

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from dschat_lora.config.data import DataConfig
from dschat_lora.config.groups import is_on
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import describe_tokenizer, make_encoder
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind, row_options
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import data_rank, device, world_size
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.merge import check_mergeable
from dschat_lora.lora.rates import ruled_rates
from dschat_lora.models.blocks import offload_inputs, recompute_blocks
from dschat_lora.models.build import as_trained, check_targets
from dschat_lora.models.composite import Task
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.models.loading import Tokenizer, attention_note, load_config, load_tokenizer
from dschat_lora.models.option_checks import position_limit
from dschat_lora.rl.draw.player import Player
from dschat_lora.rl.draw.source import check_others
from dschat_lora.rl.learn.roles import Roles, build_roles
from dschat_lora.rl.learn.served_teacher import ServedTeacher, open_teacher
from dschat_lora.rl.learn.teacher import TeacherPrompts
from dschat_lora.rl.loop.advice import explaining_memory
from dschat_lora.rl.loop.memory import (
    keeping_cache,
    memory_plan,
    trained_models,
    unpacking_for_rollouts,
    unpacking_note,
)
from dschat_lora.rl.loop.validation import fit_lengths
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import (
    Sources,
    answers_data,
    find_sources,
    other_tokenizer,
    shares_base,
    text_data,
)
from dschat_lora.rl.options.role_config import RoleConfig, TeacherConfig, option_errors_for
from dschat_lora.rl.play.players import load_player
from dschat_lora.rl.score.reward_functions import (
    RewardFunction,
    load_function,
    load_scorer,
)
from dschat_lora.rl.score.scores import RewardSum, TeacherScorer
from dschat_lora.rl.watch.throughput import FlopCounter
from dschat_lora.runtime.memory import MemoryPlan, free_memory
from dschat_lora.runtime.run import OpenRun
from dschat_lora.runtime.setup import (
    builds_shapes_alone,
    check_room_for,
    check_same_models,
    engine_settings,
    engine_words,
    note_all_weights,
    num_elements,
    prepare_to_compile,
    read_data,
    read_training_data,
    record_models,
    resolve_recomputation,
    say_coverage,
    say_uncounted,
    shard_model,
    state_identity,
    tensor_group,
    trained_elements,
)
from dschat_lora.runtime.streaming import SharedStream


@dataclass(frozen=True)
class RlhfSetup:
    """Data, models and functions of a run, before the engines."""

    config: RlhfConfig
    sources: Sources
    tokenizer: Tokenizer
    prompts: Prepared
    text: Prepared | None  # pretraining text to mix in
    answers: Prepared | None  # the data's own, which the actor learns from beside those it draws
    teacher_prompts: TeacherPrompts | None  # None: the reference reads what the actor reads
    roles: Roles
    settings: dict[str, EngineSettings]  # by trained role
    counter: FlopCounter | None  # None for an architecture that is not understood
    scorer: RewardSum | TeacherScorer  # to which the reward model is added, if there is one
    judge: RewardFunction | None
    player: Player  # of the rollouts
    plan: MemoryPlan | None  # None for an architecture that is not understood
    unpacked: bool | None  # 4-bit weights once for a rollout; None: as the free memory allows
    run: OpenRun[RlhfConfig]
    teacher: ServedTeacher | None = None  # in the place of a reference among the roles
    engine_started: Any = None  # what the rollout engine needs to have before models take memory
    identity: dict[str, Any] = field(default_factory=dict)  # what the run's state belongs to

    def stream(self, data: DataConfig, head: Prepared, kind: DataKind) -> SharedStream:
        """The rows of these data, of which the ``head`` was prepared, to be read meanwhile."""
        return SharedStream(
            data,
            self.tokenizer,
            head,
            phase=3,
            kind=kind,
            seed=self.config.run.seed,
            closing=self.run.closing,
        )


def set_up(run: OpenRun[RlhfConfig]) -> RlhfSetup:
    """Prompts and roles, shown and recorded; call on every rank.

    Raises:
        ValueError: if data, a model or a function cannot be used.
    """
    config = run.config
    if config.load.compile:
        prepare_to_compile(run)
    sources = find_sources(config)
    check_same_models(sources.actor, sources.critic, sources.teacher)
    config = _with_fitting_lengths(config, sources)
    group = tensor_group(config.parallel)
    _check_layers(config, sources, group)
    config = _with_ruled_rates(config, sources, run)
    tokenizer = _load_tokenizer(config, sources)
    teacher = _open_teacher(config, tokenizer, run)
    player = load_player(config, tokenizer, run.closing)
    scorer = _scorer(config, tokenizer, player)
    name = config.rewards.judge_function
    judge = None if name is None else load_function("judge_function", name, tokenizer)
    prompts = read_training_data(config.data.data, tokenizer, run, phase=3, kind="prompts")
    _check_columns(prompts, scorer, judge, player)
    check_others(config, len(prompts.train))
    text = _read_text(config, tokenizer, run)
    answers = _read_answers(config, tokenizer, run)
    started = config.batch.engine.prepare(config, sources, run)
    settings, free = role_settings(config), free_memory()
    build = partial(
        build_roles,
        sources=sources,
        tokenizer=tokenizer,
        dtype=settings["actor"].torch_dtype,
        group=group,
    )
    roles = build(config, meta=builds_shapes_alone(config.run, settings.values()))
    config = _resolve_recomputation(config, settings, roles, run, free=free)
    run = replace(run, config=config)
    counter = _counter(config, roles)
    plan, unpacked = unpacking_for_rollouts(memory_plan(config, roles, settings), roles, free=free)
    setup = RlhfSetup(
        config,
        sources,
        tokenizer,
        prompts,
        text,
        answers,
        _teacher_prompts(config, tokenizer, sources, teacher),
        roles,
        settings,
        counter,
        scorer,
        judge,
        player,
        keeping_cache(plan, config, settings, free=free),
        unpacked,
        run,
        teacher,
        started,
    )
    _describe(setup)
    if unpacked is not None:
        run.log.say(f"  note         {unpacking_note(roles, unpacked)}")
    if run.directory is not None:
        planned = partial(_plan_of, roles=roles, built=config, build=build)
        run.closing.enter_context(explaining_memory(config, setup.plan, planned, run.directory))
        setup = replace(setup, identity=_identity(setup))
        _shard_roles(roles, settings)
        # Those that no engine knows as well, such as the rotary tables of the rollout's modules.
        roles.whole().to(device())
    return setup


def _check_columns(
    prompts: Prepared,
    scorer: RewardSum | TeacherScorer,
    judge: RewardFunction | None,
    player: Player,
) -> None:
    """Refuse functions that ask for columns which the prompts lack."""
    columns = {*json.loads(prompts.train[0].columns or b"{}")}
    for other in (*player.asks, *([] if judge is None else [judge])):
        other.check_columns(columns)
    scorer.check_columns(columns)


def _scorer(config: RlhfConfig, tokenizer: Tokenizer, player: Player) -> RewardSum | TeacherScorer:
    """What scores, but for the reward model, which engines have.

    Raises:
        ValueError: if nothing scores.
    """
    rewards, has_model = config.rewards, config.critic.model_name_or_path is not None
    gates_score = bool(rewards.reward_gate) and player.objects is not None
    if rewards.reward_function or player.reward_name is not None or has_model or gates_score:
        return load_scorer(
            rewards,
            tokenizer,
            has_model=has_model,
            episodes=player.reward_name,
            objects=player.objects,
        )
    if config.ppo.rules.distills:
        return TeacherScorer()
    raise ValueError(
        f"--environment {config.batch.environment} gives no reward (a class may, by get_reward "
        "or step), and neither --reward_function nor --critic_model_name_or_path does"
    )


def _with_fitting_lengths(config: RlhfConfig, sources: Sources) -> RlhfConfig:
    """With lengths that the models have positions for; those of the hub are known only here."""
    limits = []
    for role, source in sources.by_role.items():
        with option_errors_for(role):
            options: RoleConfig | TeacherConfig = getattr(config, role)
            model = as_trained(options.model(config.load), source)
            limits.append(position_limit(load_config(source.base, model).to_dict(), {}))
    return fit_lengths(config, limits)


def _with_ruled_rates(config: RlhfConfig, sources: Sources, run: OpenRun[RlhfConfig]) -> RlhfConfig:
    """With rates by published rules for roles whose ``learning_rate`` is auto; shown, recorded."""
    found = {"actor": config.actor, "critic": config.critic}
    for role, options in config.trained.items():
        if options.learning_rate != "auto":
            continue
        source = sources.by_role.get(role, sources.actor)
        model = load_config(source.base, options.model(config.load))
        lora = options.lora(config.classic.only_optimize_lora)
        stage = "distill" if config.ppo.rules.distills else config.stage
        rates = ruled_rates(model.model_type, model.hidden_size, stage=stage, lora=lora)
        typed = f"{role}_lora_learning_rate" in config.given
        adapter = options.lora_learning_rate if typed else rates.adapter
        found[role] = replace(options, ruled=(rates.base, adapter))
        rate = adapter if lora.lora_dim else rates.base
        run.log.say(f"  rate         {role} {rate:.3g} by auto: {rates.reason}")
        run.record.update({"rates": {role: each.ruled for role, each in found.items()}})
    return replace(config, actor=found["actor"], critic=found["critic"])


def _check_layers(config: RlhfConfig, sources: Sources, group: TensorGroup | None) -> None:
    """Try each role's choice of layers on the empty shape of its model."""
    tasks: dict[str, Task] = {"actor": "CAUSAL_LM", "critic": "SEQ_CLS"}
    for role, options in config.trained.items():
        with option_errors_for(role):
            check_targets(
                sources.by_role.get(role, sources.actor),
                options.model(config.load),
                options.lora(config.classic.only_optimize_lora),
                tasks[role],
                expert_learning_rate=options.expert_learning_rate,
                group=group,
            )


def _load_tokenizer(config: RlhfConfig, sources: Sources) -> Tokenizer:
    """The actor's tokenizer, which all roles must share: they read the very same tokens.

    Raises:
        ValueError: if the reward model, or the teacher, was trained with another.
    """
    with option_errors_for("actor"):
        tokenizer = load_tokenizer(sources.actor.tokenizer, config.actor.model(config.load))
    for role, source in sources.by_role.items():
        options: RoleConfig | TeacherConfig = getattr(config, role)
        with option_errors_for(role):
            other = load_tokenizer(source.tokenizer, options.model(config.load))
        if _rules(other) != _rules(tokenizer):
            raise ValueError(other_tokenizer(config, role))
    return tokenizer


def _rules(tokenizer: Tokenizer) -> str:
    described = describe_tokenizer(tokenizer)
    # How chats are written and in which class is no matter of tokens.
    kept = {k: v for k, v in described.items() if k not in ("chat_template", "class")}
    return json.dumps(kept, sort_keys=True)


def _read_text(
    config: RlhfConfig, tokenizer: Tokenizer, run: OpenRun[RlhfConfig]
) -> Prepared | None:
    """Pretraining text to mix in, if it is asked for.

    Raises:
        ValueError: if there is nothing to learn from it.
    """
    data = text_data(config)
    if data is None:
        return None
    text = read_data(data, tokenizer, run, phase=3, kind="samples", name="pretraining text")
    # Of text nothing is learnt about where answers end: it may be cut.
    if text.audit.supervised_tokens == 0:
        raise ValueError(
            f"--unsupervised_dataset_name {config.pretraining.unsupervised_dataset_name} holds no "
            "text to learn from"
        )
    return text


def _read_answers(
    config: RlhfConfig, tokenizer: Tokenizer, run: OpenRun[RlhfConfig]
) -> Prepared | None:
    """The data's own answers, where ``--on_policy_share`` leaves room for some.

    Raises:
        ValueError: if the rows have none.
    """
    if not config.ppo.rules.distills or config.teacher.on_policy_share == 1:
        return None
    answers = read_data(
        answers_data(config), tokenizer, run, phase=3, kind="samples", name="answers"
    )
    if answers.audit.supervised_tokens == 0:
        raise ValueError(
            f"--on_policy_share {config.teacher.on_policy_share:g} needs rows with answers, and "
            f"--data_path {' '.join(config.data.data_path)} has none: use --on_policy_share 1"
        )
    return answers


def _open_teacher(
    config: RlhfConfig, tokenizer: Tokenizer, run: OpenRun[RlhfConfig]
) -> ServedTeacher | None:
    """The server that is the teacher, if one is; on every rank."""
    if config.teacher.server is None:
        return None
    teacher = open_teacher(
        *config.teacher.server,
        tokenizer,
        max_seq_len=config.data.max_seq_len,
        timeout=config.batch.rollout_timeout,
        in_flight=config.batch.per_device_generation_batch_size * world_size(),
        say=lambda words: run.log.say(f"  note         --teacher_model_name_or_path: {words}"),
    )
    run.closing.callback(teacher.pool.close)
    return teacher


def _teacher_prompts(
    config: RlhfConfig, tokenizer: Tokenizer, sources: Sources, teacher: ServedTeacher | None
) -> TeacherPrompts | None:
    """What the teacher reads in the place of prompts, with ``--teacher_system_prompt``."""
    system = config.teacher.teacher_system_prompt
    if system is None:
        return None
    if teacher is not None:
        most = sys.maxsize if teacher.limit is None else teacher.limit - 1  # it draws a token
    else:
        options = config.actor if sources.teacher is None else config.teacher
        fields = load_config((sources.teacher or sources.actor).base, options.model(config.load))
        most = getattr(fields, "max_position_embeddings", None) or sys.maxsize
    return TeacherPrompts(
        system,
        make_chat(tokenizer, config.data.data.chat_template_kwargs),
        make_encoder(tokenizer),
        tokenizer,
        most=most,
        options=row_options(config.data.data),
    )


def role_settings(config: RlhfConfig) -> dict[str, EngineSettings]:
    """How the engine of each trained role is built, on this machine."""
    shares_weights = config.has_critic and shares_base(config)
    return {
        name: engine_settings(
            config,
            dtype=config.load.dtype,
            zero_stage=role.zero_stage,
            micro_batch_size=config.batch.per_device_training_batch_size,
            shares_weights=shares_weights,
        )
        for name, role in config.trained.items()
    }


def _resolve_recomputation(
    config: RlhfConfig,
    settings: dict[str, EngineSettings],
    roles: Roles,
    run: OpenRun[RlhfConfig],
    *,
    free: int,
) -> RlhfConfig:
    """The config with each role's recomputation on or off, as the models then do.

    Raises:
        ValueError: if blocks are to be recomputed, and the architecture cannot.
    """
    # The critic first: it is the smaller one as a rule, and costs less to compute again.
    options = {role: f"{role}_gradient_checkpointing" for role in ("critic", "actor")}
    trained = [role for role in options if role in roles.trained]

    def with_options(on: Collection[str]) -> RlhfConfig:
        changed = {
            role: replace(getattr(config, role), gradient_checkpointing=option in on)
            for role, option in options.items()
        }
        return replace(config, **changed)

    def estimate(config: RlhfConfig) -> int | None:
        plan = memory_plan(config, roles, settings)
        return None if plan is None else plan.updating

    config = resolve_recomputation(
        run,
        {options[role]: roles.trained[role].model for role in trained},
        with_options=with_options,
        estimate=estimate,
        free=free,
    )
    for role in trained:
        if getattr(config, role).gradient_checkpointing:
            with option_errors_for(role):
                recompute_blocks(roles.trained[role].model)
            if config.parallel.offload_activations:
                offload_inputs(roles.trained[role].model)
    return config


def _plan_of(
    config: RlhfConfig, *, roles: Roles, built: RlhfConfig, build: Callable[..., Roles]
) -> MemoryPlan | None:
    """The memory of ``roles``, which were ``built`` otherwise, at other options."""
    if config.load.base_bits != built.load.base_bits:
        roles = build(config, meta=True)
    return memory_plan(config, roles, role_settings(config))


def _shard_roles(roles: Roles, settings: dict[str, EngineSettings]) -> None:
    """Shard what is at ZeRO 3; on every rank. Roles on one base can only be sharded together."""
    reference = [] if roles.reference is None else [roles.reference.model]
    policies = nn.ModuleList([roles.actor.model, *reference, roles.rollout])
    scorers = nn.ModuleList([m.model for m in (roles.critic, roles.reward) if m is not None])
    shared = {id(p) for p in policies.parameters()} & {id(p) for p in scorers.parameters()}
    if shared or "critic" not in settings:
        shard_model(roles.whole(), settings["actor"])
        return
    shard_model(policies, settings["actor"])
    shard_model(scorers, settings["critic"])


def _counter(config: RlhfConfig, roles: Roles) -> FlopCounter | None:
    try:
        return FlopCounter(
            roles,
            checkpointed={
                name: is_on(getattr(config, name).gradient_checkpointing) for name in roles.trained
            },
            num_generations=config.batch.num_generations,
            batch_size=config.batch.rows_decoded,
            decodes_here=config.batch.engine.decodes_actor,
            compares=roles.teaches and config.teacher.beta is not None,
        )
    except ValueError:  # the start-up says why
        return None


def _describe(setup: RlhfSetup) -> None:
    """Show and record what trains, on what, and the memory it takes."""
    plan, roles, settings, run = setup.plan, setup.roles, setup.settings, setup.run
    total = num_elements(roles.whole().parameters())  # each shared one once
    trained = {name: trained_elements(m.model) for name, m in roles.trained.items()}
    actor = settings["actor"]
    run.log.say(
        f"  parameters   {total:,} in memory for {' + '.join(roles.models)}; trained: "
        + ", ".join(f"{name} {count:,}" for name, count in trained.items())
        + f"; {engine_words(actor, roles.actor.model)}"
    )
    notes = (attention_note(each.model, run.config.load) for each in roles.models.values())
    for note in sorted(set(filter(None, notes))):
        run.log.say(f"  note         {note}")
    models = {role: each.model for role, each in roles.models.items()}
    say_coverage(run, {role: models[role] for role in roles.trained})
    say_uncounted(run, models)
    for role, model in roles.trained.items():
        if run.config.run.merge_adapter:
            check_mergeable(model.model)
        for fact in model.facts():
            run.log.say(f"  {fact}")
        options: RoleConfig = getattr(run.config, role)
        if options.lora_dim == 0:
            note_all_weights(run, f"{role}_lora_dim")
        if warning := options.rate_warning(
            num_elements(model.model.parameters()), given=run.config.given
        ):
            run.log.say(f"  warning      {warning}")
    if plan is not None:
        run.log.say(f"  {plan.line()}")
        run.record.update({"memory": plan.to_dict()})
    load = run.config.load
    for role, each in trained_models(run.config, roles, settings).items():
        if words := each.launch_advice(fused_kernels=load.fused_kernels, compiled=load.compile):
            run.log.say(f"  note         {role}: {words}")
    parameters = {"total": total, "trainable": sum(trained.values()), **trained}
    check_room_for(run, parameters["trainable"])
    record_models(run, actor, parameters=parameters, layers=roles.actor.targets)


def _identity(setup: RlhfSetup) -> dict[str, Any]:
    """What the run's state belongs to; complete on rank 0. On every rank."""
    if data_rank() != 0:
        return {}
    roles, prompts, text = setup.roles, setup.prompts, setup.text
    scorer = roles.reward or roles.critic
    critic = None
    if scorer is not None:
        critic = f"{base_fingerprint(scorer.model)} {adapter_fingerprint(scorer.model)}"
    found = state_identity(roles.actor, setup.tokenizer, prompts, setup.settings["actor"]) | {
        "critic": critic,
        "text": None if text is None else text.train.identity,
        "rows": len(prompts.train),
    }
    if setup.teacher is not None:
        found["teacher"] = setup.teacher.model
    elif roles.teaches:
        assert roles.reference is not None
        model = roles.reference.model
        found["teacher"] = f"{base_fingerprint(model)} {adapter_fingerprint(model)}"
    if setup.answers is not None:
        found["answers"] = setup.answers.train.identity
    return found
