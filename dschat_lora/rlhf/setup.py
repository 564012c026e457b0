"""What step 3 sets up before it trains: prompts, roles and engines, and their record."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dschat_lora.config.groups import DataConfig, is_on
from dschat_lora.config.options import flatten
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.fingerprint import describe_tokenizer
from dschat_lora.data.loader import StepLoader
from dschat_lora.data.packing import make_rows
from dschat_lora.data.prepare import Prepared
from dschat_lora.engine.build import EngineSettings, TrainEngine
from dschat_lora.engine.distributed import data_rank, data_world_size, device
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.architecture_checks import check_architecture, head_is_linear
from dschat_lora.models.build import can_recompute, recompute_blocks
from dschat_lora.models.causal_lm import LMHeadModel, Tokenizer, load_tokenizer
from dschat_lora.models.compile import compile_blocks
from dschat_lora.models.fingerprint import adapter_fingerprint, base_fingerprint
from dschat_lora.models.policy import Policy
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.rlhf.config import RlhfConfig, RoleConfig, option_errors_for
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.memory import memory_plan
from dschat_lora.rlhf.pretraining import Pretraining
from dschat_lora.rlhf.rewards import RewardFunction, load_function
from dschat_lora.rlhf.roles import Network, Roles, Sources, build_roles
from dschat_lora.rlhf.throughput import FlopCounter
from dschat_lora.rlhf.validation import find_sources, shares_base, text_data
from dschat_lora.runtime.memory import free_memory, settle_recomputation
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
    """A run with everything but its course."""

    config: RlhfConfig
    sources: Sources
    tokenizer: Tokenizer
    prompts: Prepared
    text: Prepared | None  # pretraining text to mix in
    roles: Roles
    settings: dict[str, EngineSettings]  # by trained role
    counter: FlopCounter | None  # None for an architecture that is not understood
    function: RewardFunction | None
    judge: RewardFunction | None
    identity: dict[str, Any]
    run: Run[RlhfConfig]


def set_up(run: Run[RlhfConfig]) -> Setup:
    """Prompts and roles, shown and recorded; call on every rank.

    Raises:
        ValueError: if data, a model or a function cannot be used.
    """
    config = run.config
    if config.load.compile:
        prepare_to_compile(run)
    sources = Sources(*find_sources(config))
    tokenizer = _load_tokenizer(config, sources)
    function, judge = (
        None if name is None else load_function(option, name, tokenizer)
        for option, name in (
            ("reward_function", config.rewards.reward_function),
            ("judge_function", config.rewards.judge_function),
        )
    )
    prompts = _prepare(config, config.data.data, tokenizer, run, kind="prompts")
    text_config = text_data(config)
    text = None
    if text_config is not None:
        text = _prepare(config, text_config, tokenizer, run, kind="samples")
    settings = _settings(config)
    dtype = settings["actor"].torch_dtype
    all_sharded = all(each.zero_stage == 3 for each in settings.values())
    shape_only = config.run.dry_run or (all_sharded and data_rank() > 0)
    free = free_memory()
    roles = build_roles(
        config,
        sources,
        tokenizer,
        dtype=dtype,
        meta=shape_only,
        group=tensor_group(config.parallel),
    )
    config = _settle_memory(config, settings, roles, run, free=free)
    run = replace(run, config=config)
    counter = _counter(config, roles, run)
    _describe(config, roles, settings, run)
    identity: dict[str, Any] = {}
    if run.directory is not None:
        run.closing.enter_context(_explaining_memory(config, roles))
        identity = _identify(config, roles, tokenizer, prompts, text, settings)
        _place(roles, settings)
        # Those that no engine knows as well, such as the rotary tables of the rollout's modules.
        roles.whole().to(device())
    return Setup(
        config,
        sources,
        tokenizer,
        prompts,
        text,
        roles,
        settings,
        counter,
        function,
        judge,
        identity,
        run,
    )


def build_engines(setup: Setup) -> Engines:
    """The engines over the roles; call on every rank."""
    config, roles = setup.config, setup.roles
    entropy_trains = config.ppo.entropy_coef > 0
    own: dict[str, Any] = {
        "actor": Policy(roles.actor.model, entropy_trains=entropy_trains),
        "reference": Policy(roles.reference.model),
    }
    scorers = {}
    if roles.critic is not None:
        scorers["critic"] = RewardModel(roles.critic.model)
    if roles.reward is not None:
        scorers["reward"] = RewardModel(roles.reward.model)
    actor = _engine(setup, "actor", Network(**own, **({} if roles.critic else scorers)))
    critic = _engine(setup, "critic", Network(**scorers)) if roles.critic is not None else None
    reward = (critic or actor) if roles.reward is not None else None
    engines = Engines(actor, critic, reward, config.batch.temperature)
    if config.load.compile:
        # Those that decode are other modules, and not compiled.
        for each in roles.models.values():
            compile_blocks(each.model)
    engines.eval()
    _settle(setup, engines)
    return engines


def make_pretraining(setup: Setup) -> Pretraining | None:
    """Text for each optimizer step, if any is mixed in."""
    if setup.text is None:
        return None
    config = setup.config
    rows = make_rows(
        setup.text.train.lengths,
        max_seq_len=config.data.max_seq_len,
        packing=False,
        seed=config.run.seed,
    )
    loader = StepLoader(
        setup.text.train,
        rows=rows,
        micro_batch_size=config.batch.per_device_training_batch_size,
        gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        rank=data_rank(),
        world_size=data_world_size(),
        seed=config.run.seed,
        collate=SampleCollator(int(setup.tokenizer.pad_token_id)),
    )
    return Pretraining(loader, coefficient=config.pretraining.unsup_coef)


def _load_tokenizer(config: RlhfConfig, sources: Sources) -> Tokenizer:
    """The actor's tokenizer, which all roles must share: they read the very same tokens.

    Raises:
        ValueError: if the reward model was trained with another.
    """
    with option_errors_for("actor"):
        tokenizer = load_tokenizer(sources.actor.tokenizer, config.actor.model(config.load))
    if sources.critic is not None:
        with option_errors_for("critic"):
            other = load_tokenizer(sources.critic.tokenizer, config.critic.model(config.load))
        if _rules(other) != _rules(tokenizer):
            raise ValueError(
                f"--critic_model_name_or_path {config.critic.model_name_or_path} has another "
                f"tokenizer than --actor_model_name_or_path {config.actor.model_name_or_path}: it "
                "would read other tokens than the actor wrote; train it on a base of that family"
            )
    return tokenizer


def _rules(tokenizer: Tokenizer) -> str:
    described = describe_tokenizer(tokenizer)
    # How chats are written and in which class is no matter of tokens.
    kept = {k: v for k, v in described.items() if k not in ("chat_template", "class")}
    return json.dumps(kept, sort_keys=True)


def _prepare(
    config: RlhfConfig, data: DataConfig, tokenizer: Tokenizer, run: Run[RlhfConfig], *, kind: Any
) -> Prepared:
    """Tokenised rows, audited."""
    name = "data" if kind == "prompts" else "pretraining text"
    seed = config.run.seed
    prepared = read_data(data, tokenizer, phase=3, seed=seed, kind=kind, name=name, run=run)
    if kind == "prompts" and config.optim.num_train_epochs > 0:
        prepared.audit.check()
    # Of text nothing is learnt about where answers end: it may be cut.
    if kind != "prompts" and prepared.audit.supervised_tokens == 0:
        raise ValueError(
            f"--unsupervised_dataset_name {config.pretraining.unsupervised_dataset_name} holds no "
            "text to learn from"
        )
    return prepared


def _settings(config: RlhfConfig) -> dict[str, EngineSettings]:
    """How the engine of each trained role is built, on this machine."""
    roles = {"actor": config.actor} | ({"critic": config.critic} if config.has_critic else {})
    shares_weights = config.has_critic and shares_base(config)
    return {
        name: engine_settings(
            config,
            dtype=config.load.dtype,
            zero_stage=role.zero_stage,
            micro_batch_size=config.batch.per_device_training_batch_size,
            shares_weights=shares_weights,
        )
        for name, role in roles.items()
    }


def _settle_memory(
    config: RlhfConfig,
    settings: dict[str, EngineSettings],
    roles: Roles,
    run: Run[RlhfConfig],
    *,
    free: int,
) -> RlhfConfig:
    """The config with each role's recomputation settled, as the models then do. On every rank."""
    # The critic first: it is the smaller one as a rule, and costs less to compute again.
    options = {f"{role}_gradient_checkpointing": role for role in ("critic", "actor")}
    able = all(can_recompute(m.model) for m in roles.trained.values())

    def recomputing(on: Sequence[str]) -> RlhfConfig:
        return replace(
            config,
            **{
                role: replace(getattr(config, role), gradient_checkpointing=option in on)
                for option, role in options.items()
            },
        )

    def need(on: Sequence[str]) -> int:
        plan = memory_plan(recomputing(on), roles, settings) if able else None
        return 0 if plan is None else plan.updating

    trained = {option: role for option, role in options.items() if role in roles.trained}
    switches = {o: getattr(config, role).gradient_checkpointing for o, role in trained.items()}
    on, words = settle_recomputation(config, switches, need, free=free)
    if words is not None:
        run.log.say(f"  note         {words}")
    chosen = [option for option in on if on[option]]
    for option in chosen:
        with option_errors_for(trained[option]):
            recompute_blocks(roles.trained[trained[option]].model)
    run.record.update(on)
    return recomputing(chosen)


def _place(roles: Roles, settings: dict[str, EngineSettings]) -> None:
    """Shard what is at ZeRO 3; on every rank. Roles on one base can only be sharded together."""
    policies = nn.ModuleList([roles.actor.model, roles.reference.model, roles.rollout])
    scorers = nn.ModuleList([m.model for m in (roles.critic, roles.reward) if m is not None])
    shared = {id(p) for p in policies.parameters()} & {id(p) for p in scorers.parameters()}
    if shared or "critic" not in settings:
        shard_model(roles.whole(), settings["actor"])
        return
    shard_model(policies, settings["actor"])
    shard_model(scorers, settings["critic"])


def _engine(setup: Setup, role: str, network: Network) -> TrainEngine[Network]:
    options: RoleConfig = getattr(setup.config, role)
    groups = parameter_groups(setup.roles.models[role].model, options.optim(setup.config.optim))
    return TrainEngine(network, groups, setup.settings[role])


def _settle(setup: Setup, engines: Engines) -> None:
    """Look at how the user's own models treat rows and logits; call on every rank."""
    for engine in engines.trained.values():
        for role in engine.module.roles.values():
            report = check_architecture(
                role.backbone, vocab_size=len(setup.tokenizer), device=engine.device
            )
            # Every response has a row of its own, which any mask gets right.
            role.backbone.own_mask |= not report.packing_is_exact
    roles = engines.actor.module.roles
    if not head_is_linear(roles["actor"].model, vocab_size=len(setup.tokenizer), device=device()):
        for role in roles.values():
            if isinstance(role, LMHeadModel):
                role.full_logits = True
        setup.run.log.say(
            "  note         this architecture transforms its logits: they are computed whole, "
            "which takes more memory"
        )


def _counter(config: RlhfConfig, roles: Roles, run: Run[RlhfConfig]) -> FlopCounter | None:
    checkpointed = {
        "actor": is_on(config.actor.gradient_checkpointing),
        "critic": is_on(config.critic.gradient_checkpointing),
    }
    try:
        return FlopCounter(
            roles,
            checkpointed=checkpointed,
            num_generations=config.batch.num_generations,
            batch_size=config.batch.per_device_generation_batch_size,
        )
    except ValueError as error:
        run.log.say(f"  note         TFLOPs are not reported: {error}")
        return None


def _describe(
    config: RlhfConfig, roles: Roles, settings: dict[str, EngineSettings], run: Run[RlhfConfig]
) -> None:
    """Show and record what trains, on what, and the memory it takes."""
    parameters = list(roles.whole().parameters())  # each shared one once
    total = sum(full_shape(p).numel() for p in parameters)
    trained = {
        name: sum(full_shape(p).numel() for p in m.model.parameters() if p.requires_grad)
        for name, m in roles.trained.items()
    }
    actor = settings["actor"]
    run.log.say(
        f"  parameters   {total:,} in memory for {' + '.join(roles.models)}; trained: "
        + ", ".join(f"{name} {count:,}" for name, count in trained.items())
        + f"; {actor.dtype}, {zero_words(actor, roles.models['actor'].model)}, "
        f"{process_words()}"
    )
    plan = memory_plan(config, roles, settings)
    if plan is not None:
        for line in plan.lines():
            run.log.say(f"  {line}")
        run.record.update({"memory": plan.to_dict()})
    run.record.update(
        {
            "parameters": {"total": total, "trainable": sum(trained.values()), **trained},
            "dtype": actor.dtype,
            "adapted_layers": roles.actor.targets,
        }
    )
    if config.run.dry_run:
        for name, value in flatten(config).items():
            run.log.say(f"  --{name} {value}")
        run.log.say("dry run: nothing was trained or saved")


def _identify(
    config: RlhfConfig,
    roles: Roles,
    tokenizer: Tokenizer,
    prompts: Prepared,
    text: Prepared | None,
    settings: dict[str, EngineSettings],
) -> dict[str, Any]:
    """What the run's state would mean nothing without; complete on rank 0. On every rank."""
    if data_rank() != 0:
        return {}
    scorer = roles.reward or roles.critic
    return state_identity(roles.actor, tokenizer, prompts, settings["actor"]) | {
        "critic": None if scorer is None else _whole_fingerprint(scorer.model),
        "text": None if text is None else text.train.digest(),
        "rows": len(prompts.train),
    }


def _whole_fingerprint(model: Any) -> str:
    return f"{base_fingerprint(model)} {adapter_fingerprint(model)}"


@contextmanager
def _explaining_memory(config: RlhfConfig, roles: Roles) -> Iterator[None]:
    """Inside the block, running out of GPU memory says what to change."""
    kept = [
        f"--{role}_gradient_checkpointing"
        for role in roles.trained
        if not getattr(config, role).gradient_checkpointing
    ]
    try:
        yield
    except torch.OutOfMemoryError as error:
        rows = (
            "--tokens_per_device"
            if config.batch.tokens_per_device
            else "--per_device_training_batch_size (and raise --gradient_accumulation_steps by as "
            "much)"
        )
        raise torch.OutOfMemoryError(
            f"the GPU is full: lower {rows} or --per_device_generation_batch_size (and "
            "raise --generation_batches)" + (f", or use {' '.join(kept)}" if kept else "")
        ) from error
