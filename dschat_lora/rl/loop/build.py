"""Parts of a run, built from its setup: engines, generator, pretraining text."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_lora.config.addons import groups_of
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import Loader, StepLoader
from dschat_lora.data.packing import make_rows
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import data_rank, data_world_size, rank
from dschat_lora.generation.stops import end_of_text, stop_ids
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.blocks import compile_blocks
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.report.rollout_file import open_rollouts
from dschat_lora.rl.draw.engine import EngineSite, make_engine
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.rl.learn.engines import Engines, Network, policies_of, resolve_architecture
from dschat_lora.rl.loop.parts import KlControl, Parts, RolloutLog
from dschat_lora.rl.loop.schedule import RlhfProgress
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.options.inputs import text_data
from dschat_lora.rl.options.role_config import option_errors_for
from dschat_lora.runtime.graphs import record_training
from dschat_lora.runtime.resume import resumes_in_place, run_of

if TYPE_CHECKING:
    from dschat_lora.rl.learn.pretraining import Pretraining


def build_engines(setup: RlhfSetup) -> Engines:
    """The engines over the roles; call on every rank."""
    config, roles = setup.config, setup.models.roles
    entropy_trains = config.ppo.entropy_coef > 0
    reference = None if roles.reference is None else roles.reference.model
    policies = policies_of(roles.actor.model, reference, entropy_trains=entropy_trains)
    head = None
    if reference is not None:
        head = setup.reference.head(roles.actor.model, reference, entropy_trains=entropy_trains)
    names = [name for name in ("critic", "reward") if name in roles.models]
    scorers: dict[str, Any] = {n: RewardModel(roles.models[n].model) for n in names}
    beside = {} if roles.critic else scorers
    actor = _engine(setup, "actor", Network(head=head, **policies, **beside))
    critic = _engine(setup, "critic", Network(**scorers)) if roles.critic is not None else None
    reward = (critic or actor) if roles.reward is not None else None
    engines = Engines(actor, critic, reward, config.batch.temperature, setup.reference)
    if config.load.compile:
        # Those that decode are other modules, and not compiled.
        for each in roles.models.values():
            compile_blocks(each.model)
    engines.eval()
    for name in setup.costs.recorded:
        record_training(engines.trained[name].module, roles.models[name].model)
    return resolve_architecture(engines, len(setup.tokenizer), setup.run)


def _engine(setup: RlhfSetup, role: str, network: Network) -> TrainEngine[Network]:
    with option_errors_for(role):
        model = setup.models.roles.models[role].model
        groups = parameter_groups(model, setup.config.roles[role].optim)
    return TrainEngine(network, groups, setup.models.settings[role])


def make_parts(
    setup: RlhfSetup, progress: RlhfProgress, pretraining: "Pretraining | None"
) -> Parts:
    """The parts of a run by its options; a ValueError says that an add-on's cannot be made."""
    config, classic, run = setup.config, setup.config.classic, setup.run
    assert run.directory is not None, "a dry run keeps nothing"
    earlier = None
    if config.checkpoint and not resumes_in_place(config):
        earlier = run_of(Path(config.checkpoint))
    rollouts = RolloutLog(
        open_rollouts(run.directory, run.log, active=rank() == 0, source=earlier),
        setup.tokenizer.decode,
        most=classic.log_rollouts,
        iteration=lambda: progress.iteration,
        media=setup.data.prompts.media,
    )
    average = None
    if classic.enable_ema:
        from dschat_lora.models.average import MovingAverage

        average = MovingAverage(setup.models.roles.actor.model, classic.ema_decay)
    makers = groups_of(config, "made_parts")
    own = chain.from_iterable(each.made_parts(setup, progress) for each in makers)
    parts = (average, KlControl(config.ppo, progress), pretraining, rollouts, *own)
    return Parts([part for part in parts if part is not None])


def make_pretraining(setup: RlhfSetup) -> "Pretraining | None":
    """Unpacked rows of the pretraining text, as many a step as responses; None without any."""
    config, data, texts = setup.config, text_data(setup.config), setup.data.text
    if texts is None or data is None:
        return None
    from dschat_lora.rl.learn.pretraining import Pretraining

    seed, tail = config.run.seed, data.tail
    options: dict[str, Any] = {
        "micro_batch_size": config.batch.per_device_training_batch_size,
        "gradient_accumulation_steps": config.batch.gradient_accumulation_steps,
        "rank": data_rank(),
        "world_size": data_world_size(),
        "seed": seed,
        "collate": SampleCollator(int(setup.tokenizer.pad_token_id)),
    }
    unpacked = partial(make_rows, max_seq_len=config.data.max_seq_len, packing=False)
    loader: Loader
    if tail is not None:
        loader = tail.text_loader(setup, data, texts, rows_of=unpacked, **options)
    else:
        loader = StepLoader(texts.train, rows=unpacked(texts.train.lengths, seed=seed), **options)
    return Pretraining(loader, coefficient=config.pretraining.unsup_coef)


def make_generator(
    setup: RlhfSetup, engines: Engines, version: Callable[[], int] = lambda: 0
) -> Generator:
    """The generator of the actor's responses, which has learnt from ``version`` iterations."""
    batch, actor = setup.config.batch, setup.models.roles.actor
    ends = frozenset(stop_ids(setup.tokenizer, actor.model, batch.stop_tokens))
    site = EngineSite(
        setup.config,
        setup.run,
        setup.models.sources.of("actor").base,
        actor,
        engines.actor,
        setup.models.roles.rollout,
        engines.actor.module.policy("actor").model,
        ends,
        int(setup.tokenizer.pad_token_id),
        setup.costs.plan,
        setup.costs.unpacked,
        setup.engine_started,
        version,
    )
    generator = partial(
        Generator, make_engine(site), setup.player, eos_ids=ends, batch_size=batch.rows_decoded
    )
    if not batch.stop_strings:
        return generator()
    decode = setup.tokenizer.decode
    return generator(find_end=partial(end_of_text, stop_strings=batch.stop_strings, decode=decode))
