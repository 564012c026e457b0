"""Parts of a run, built from its setup: engines, generator, pretraining text."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import StepLoader, make_rows
from dschat_lora.data.stream_loader import StreamLoader
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import data_rank, data_world_size
from dschat_lora.generation.stops import end_of_text, stop_ids
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.blocks import compile_blocks
from dschat_lora.models.causal_lm import DivergenceHead
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.rl.draw.rollout_engines import ServerEngine
from dschat_lora.rl.draw.rollout_servers import RolloutServers
from dschat_lora.rl.draw.vllm_server import sleeps
from dschat_lora.rl.learn.ema import MovingAverage
from dschat_lora.rl.learn.engines import Engines, policies_of, resolve_architecture
from dschat_lora.rl.learn.network import Network
from dschat_lora.rl.learn.pretraining import Pretraining
from dschat_lora.rl.loop.memory import cache_columns
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.options.inputs import text_data
from dschat_lora.rl.options.role_config import RoleConfig, option_errors_for


def build_engines(setup: RlhfSetup) -> Engines:
    """The engines over the roles; call on every rank."""
    config, roles = setup.config, setup.roles
    entropy_trains = config.ppo.has_entropy_bonus
    reference = roles.reference and roles.reference.model
    own: dict[str, Any] = {
        **policies_of(roles.actor.model, reference, entropy_trains=entropy_trains)
    }
    beta = config.teacher.beta
    scorers: dict[str, Any] = {}
    if config.ppo.rules.distills and beta is not None:
        assert roles.reference is not None, "options refuse it with a server"
        own["divergence"] = DivergenceHead(
            roles.actor.model,
            roles.reference.model,
            beta=beta,
            top_k=config.teacher.distill_top_k,
            entropy_trains=entropy_trains,
        )
    if roles.critic is not None:
        scorers["critic"] = RewardModel(roles.critic.model)
    if roles.reward is not None:
        scorers["reward"] = RewardModel(roles.reward.model)
    actor = _engine(setup, "actor", Network(**own, **({} if roles.critic else scorers)))
    critic = _engine(setup, "critic", Network(**scorers)) if roles.critic is not None else None
    reward = (critic or actor) if roles.reward is not None else None
    engines = Engines(actor, critic, reward, config.batch.temperature, teacher=setup.teacher)
    if config.load.compile:
        # Those that decode are other modules, and not compiled.
        for each in roles.models.values():
            compile_blocks(each.model)
    engines.eval()
    return resolve_architecture(engines, len(setup.tokenizer), setup.run)


def _engine(setup: RlhfSetup, role: str, network: Network) -> TrainEngine[Network]:
    options: RoleConfig = getattr(setup.config, role)
    with option_errors_for(role):
        groups = parameter_groups(setup.roles.models[role].model, options.optim(setup.config.optim))
    return TrainEngine(network, groups, setup.settings[role])


def make_average(setup: RlhfSetup) -> MovingAverage | None:
    """The actor's moving average, where one is kept."""
    classic = setup.config.classic
    if not classic.enable_ema:
        return None
    return MovingAverage(setup.roles.actor.model, classic.ema_decay)


def make_pretraining(setup: RlhfSetup) -> Pretraining | None:
    """Unpacked rows of the pretraining text, as many a step as responses; None without any."""
    config, seed, data = setup.config, setup.config.run.seed, text_data(setup.config)
    texts = setup.text
    if texts is None or data is None:
        return None
    options: dict[str, Any] = {
        "micro_batch_size": config.batch.per_device_training_batch_size,
        "gradient_accumulation_steps": config.batch.gradient_accumulation_steps,
        "rank": data_rank(),
        "world_size": data_world_size(),
        "seed": seed,
        "collate": SampleCollator(int(setup.tokenizer.pad_token_id)),
    }
    unpacked = partial(make_rows, max_seq_len=config.data.max_seq_len, packing=False)
    loader: StepLoader | StreamLoader
    if data.streaming:
        loader = StreamLoader(
            setup.stream(data, texts, "samples"),
            pack=lambda counts, seed: unpacked(counts.positions, seed=seed),
            steps=config.optim.max_steps,
            taken=config.batch.per_device_training_batch_size
            * config.batch.gradient_accumulation_steps
            * data_world_size(),
            names=(),
            kind="samples",
            say=setup.run.log.say,
            **options,
        )
    else:
        rows = unpacked(texts.train.lengths, seed=seed)
        loader = StepLoader(texts.train, rows=rows, **options)
    return Pretraining(loader, coefficient=config.pretraining.unsup_coef)


def make_generator(setup: RlhfSetup, engines: Engines) -> Generator:
    """The generator of the actor's responses.

    Raises:
        ValueError: if one of ``--stop_tokens`` is not one token.
    """
    batch, decode, plan = setup.config.batch, setup.tokenizer.decode, setup.plan
    ends = stop_ids(setup.tokenizer, setup.roles.actor.model, batch.stop_tokens)
    return Generator(
        engines.actor,
        setup.roles.rollout,
        engines.actor.module.policy("actor").model,
        eos_ids=ends,
        pad_id=int(setup.tokenizer.pad_token_id),
        batch_size=batch.rows_decoded,
        max_length=cache_columns(setup.config),
        keeps_memory=plan is not None and plan.keeps_cache,
        update_bytes=0 if plan is None else plan.update,
        merged=batch.merge_for_rollouts,
        unpacked=setup.unpacked,
        num_drafts=batch.prompt_lookup_num_tokens,
        find_end=partial(end_of_text, stop_strings=batch.stop_strings, decode=decode),
        player=setup.player,
        by_transformers=batch.rollout_engine == "transformers",
        servers=_make_server_engine(setup, ends) if setup.servers else None,
    )


def _make_server_engine(setup: RlhfSetup, ends: Collection[int]) -> ServerEngine:
    """The engine of the servers that ``--rollout_engine`` names, closed when the run is."""
    batch, run = setup.config.batch, setup.run
    servers = RolloutServers(
        setup.servers,
        in_flight=batch.per_device_generation_batch_size,
        say=lambda words: run.log.say(f"  note         --rollout_engine: {words}"),
        ends=frozenset(ends),
        vocabulary_size=int(setup.roles.actor.model.config.vocab_size),
    )
    shared = batch.rollout_adapter_dir
    engine = ServerEngine(
        servers,
        setup.roles.actor,
        base=setup.sources.actor.base,
        directory=None if shared is None else Path(shared).expanduser().resolve(),
        sleeps=batch.rollout_engine == "vllm" and sleeps(setup.config),
    )
    run.closing.callback(engine.close)
    return engine
