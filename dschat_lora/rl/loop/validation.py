"""Validation of step 3: its checks in their order, before anything heavy is imported."""

from dataclasses import replace

from dschat_lora.config.addons import through_addons
from dschat_lora.data.media import media_reader
from dschat_lora.data.rows import check_some_prompt_fits, check_sources
from dschat_lora.data.templates import read_chat_template
from dschat_lora.report.terminal import say_once
from dschat_lora.rl.options.algorithms import Correction
from dschat_lora.rl.options.config import RlhfConfig, check_weights
from dschat_lora.rl.options.inputs import (
    announce,
    check_vocabularies,
    find_sources,
    note_options,
    shares_base,
    text_data,
)
from dschat_lora.rl.options.names import check_scorer, gives_one_reward
from dschat_lora.rl.options.role_config import option_errors_for
from dschat_lora.runtime.checks import (
    Check,
    check_bundled_data_fits,
    check_lora_options,
    with_bundled,
)
from dschat_lora.runtime.directory import check_output_dir
from dschat_lora.runtime.resume import launched_processes
from dschat_lora.runtime.validation import (
    Inputs,
    check_parallel,
    check_sources_are_kept,
    check_stage,
    with_base_bits,
    with_continued_adapters,
    with_deepspeed_json,
    with_fitting_lengths,
    with_recomputation,
)

BUNDLED_LENGTHS = {"max_prompt_seq_len": 64, "max_answer_seq_len": 48}
BUNDLED_REWARD = "dschat_lora.world:reward"
# Of an iteration, over all processes, where no size of a batch is typed.
DEFAULT_RESPONSES = 64


def check_rlhf(config: RlhfConfig) -> RlhfConfig:
    """The config of step 3 with paths, bundled defaults and the DeepSpeed JSON applied.

    Where a run is resumed, see :func:`dschat_lora.runtime.checks.resolve_stage`.

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """
    return check_stage(config, RLHF_CHECKS, find_sources)


def with_bundled_prompts(config: RlhfConfig, inputs: Inputs) -> RlhfConfig:
    """With bundled prompts where none are named; the world's own judge where nothing scores."""
    if config.data.data_path:
        return config
    data, rewards = with_bundled(config.data, config.given, **BUNDLED_LENGTHS), config.rewards
    unscored = config.ppo.rules.learns_from_rewards and not config.is_scored
    if config.actor.model_name_or_path is None and unscored:
        rewards = replace(rewards, reward_function=(BUNDLED_REWARD,))
    return replace(config, data=data, rewards=rewards)


def check_rewards(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse a run that nothing scores, or functions whose modules are not there."""
    # Whether a player gives rewards shows when it is imported.
    if config.ppo.rules.learns_from_rewards and not (config.is_scored or config.players):
        raise ValueError(
            "--critic_model_name_or_path must name a reward model (the output of step 2), or "
            "--reward_function a function that scores responses: there is no reward"
        )
    rewards = config.rewards
    for name in rewards.reward_function:
        check_scorer("reward_function", name)
    if rewards.judge_function is not None:
        check_scorer("judge_function", rewards.judge_function)
    for own in config.players:
        own.check_player(config)
    if all(map(gives_one_reward, rewards.reward_function)):
        has_model = config.critic.model_name_or_path is not None
        check_weights(rewards.reward_weights, len(rewards.reward_function), has_model=has_model)


def with_overlong_punishment(config: RlhfConfig, inputs: Inputs) -> RlhfConfig:
    """With DAPO's share of the longest answer where that is not typed; one too long is refused."""
    longest, rewards = config.data.max_answer_seq_len, config.rewards
    if "soft_overlong_tokens" not in config.given:
        share = config.ppo.rules.soft_overlong_share
        rewards = replace(rewards, soft_overlong_tokens=int(share * longest))
    if rewards.soft_overlong_tokens > longest:
        raise ValueError(
            f"--soft_overlong_tokens {rewards.soft_overlong_tokens} exceeds --max_answer_seq_len "
            f"{longest}"
        )
    return replace(config, rewards=rewards)


def with_rank_of_critic(config: RlhfConfig, inputs: Inputs) -> RlhfConfig:
    """With the actor's rank for a critic that starts from the actor, unless one is typed."""
    sources = inputs.sources
    starts_anew = "critic" not in sources.by_role and sources.of("actor").adapter is None
    if not starts_anew or "critic_lora_dim" in config.given:
        return config
    return replace(config, critic=replace(config.critic, lora_dim=config.actor.lora_dim))


def check_lora(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse options of experts of a role that adapts none."""
    for name, role in config.trained.items():
        own = {each for each in role.typed(config.given) if each.startswith("expert_")}
        with option_errors_for(name):
            check_lora_options(role.lora, frozenset(own))


def check_context_parallel(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse to divide rows."""
    if config.parallel.context_parallel_size > 1:
        raise ValueError(
            f"--context_parallel_size {config.parallel.context_parallel_size} is for steps 1 and "
            "2; step 3 needs whole rows: drop it"
        )


def check_num_generations(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse to compare one response to a prompt with itself."""
    algorithm, k = config.ppo.algorithm, config.batch.num_generations
    if config.ppo.rules.compares and k < 2:
        raise ValueError(
            f"--algorithm {algorithm} compares the responses to a prompt: --num_generations must "
            f"be 2 or more and divide --per_device_generation_batch_size "
            f"{config.batch.per_device_generation_batch_size}, got {k}"
        )


def check_data(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse prompts or pretraining text that cannot be read."""
    if config.load.chat_template is not None:
        read_chat_template(config.load.chat_template)
    if config.data.data_path != inputs.asked:
        check_bundled_data_fits(inputs.sources.of("actor"), stage=config.stage, role="actor_")
    media = media_reader(config, None, inputs.sources.of("actor").base)
    check_sources(config.data.data, "prompts", media)
    check_some_prompt_fits(config.data.data, inputs.sources.of("actor").tokenizer, "prompts")
    if (data := text_data(config)) is not None:
        try:
            check_sources(data)
        except ValueError as error:
            words = str(error).replace("--data_path", "--unsupervised_dataset_name")
            raise ValueError(words) from error


def with_default_responses(config: RlhfConfig, inputs: Inputs) -> RlhfConfig:
    """With generation batches for 64 responses an iteration where no size of a batch is typed."""
    if config.given & {name for names in config.rows.values() for name in names}:
        return config
    batch, shares = config.batch, config.parallel.shares(launched_processes())
    at_once = batch.per_device_generation_batch_size * shares
    times = max(batch.generation_batches, -(-DEFAULT_RESPONSES // at_once))
    return replace(config, batch=replace(batch, generation_batches=times))


def with_whole_steps(config: RlhfConfig, inputs: Inputs) -> RlhfConfig:
    """With enough responses in an iteration for a step, and the steps of ``--enable_test_mode``."""
    batch, shares = config.batch, config.parallel.shares(launched_processes())
    wanted = batch.per_device_training_batch_size * batch.gradient_accumulation_steps
    if wanted > batch.responses:
        times = -(-wanted // batch.per_device_generation_batch_size)
        say_once(
            f"  note         --generation_batches is raised from {batch.generation_batches} to "
            f"{times}: an optimizer step takes {wanted * shares} responses, and a generation "
            f"batch gives {batch.per_device_generation_batch_size * shares}"
        )
        batch = replace(batch, generation_batches=times)
    if batch.max_num_seqs != "auto":  # no room for others is kept
        batch = replace(batch, max_num_seqs=min(batch.max_num_seqs, batch.responses))
    steps = config.classic.test_stop_step if config.classic.enable_test_mode else None
    optim = config.optim if steps is None else replace(config.optim, max_steps=steps)
    return replace(config, batch=batch, optim=optim)


def check_iterations(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse what an iteration cannot have: a short KL horizon, small budget, other attention."""
    responses = config.batch.responses * config.parallel.shares(launched_processes())
    horizon = config.ppo.kl_horizon
    if config.ppo.adaptive_kl_target and 5 * horizon <= responses:
        raise ValueError(
            f"--kl_horizon {horizon} is too short for {responses} responses an iteration: the "
            f"coefficient could change its sign; use more than {responses // 5}"
        )
    tokens, longest = config.batch.tokens_per_device, config.data.max_seq_len
    if 0 < tokens < longest:
        raise ValueError(
            f"--tokens_per_device {tokens} is less than the maximum length of a prompt and its "
            f"answer; it must be at least {longest} (--max_prompt_seq_len "
            f"{config.data.max_prompt_seq_len} + --max_answer_seq_len "
            f"{config.data.max_answer_seq_len})"
        )
    if config.load.attn_implementation == "flex_attention":
        raise ValueError(
            "--attn_implementation flex_attention does not support decoding: use sdpa or eager in "
            "step 3"
        )


def check_zero_stages(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse ZeRO 3 for one role of a shared base alone."""
    actor, critic = config.actor.zero_stage, config.critic.zero_stage
    if config.has_critic and (actor == 3) != (critic == 3) and shares_base(config, inputs.sources):
        raise ValueError(
            f"--actor_zero_stage {actor} and --critic_zero_stage {critic}: actor and critic share "
            "one base, whose weights must be sharded for both (3) or for neither"
        )


def with_rollout_engine(config: RlhfConfig, inputs: Inputs) -> RlhfConfig:
    """With the correction that the engine needs; one that cannot be used is refused."""
    batch, name, engine = config.batch, config.batch.rollout_engine, config.batch.engine
    if config.ppo.use_rollout_logprobs and not engine.exact:
        raise ValueError(
            f"--use_rollout_logprobs needs --rollout_engine own; {name} uses other kernels, whose "
            "difference --rollout_correction corrects"
        )
    weighs = config.ppo.rollout_correction is not None or config.ppo.importance_cap
    if not (engine.exact or weighs):
        kind: Correction = "tis" if batch.do_sample else "none"
        config = replace(config, ppo=replace(config.ppo, rollout_correction=kind))
    takes_whole = engine.needs_whole_weights or engine.takes_adapter
    if takes_whole and config.parallel.tensor_parallel_size > 1:
        raise ValueError(
            f"--rollout_engine {name} needs the whole model on each device, but "
            f"--tensor_parallel_size is {config.parallel.tensor_parallel_size}: drop one"
        )
    if engine.needs_whole_weights and config.actor.zero_stage == 3:
        raise ValueError(
            f"--rollout_engine {name} needs whole weights, which ZeRO 3 shards: use ZeRO 0 to 2, "
            "or own"
        )
    adapter_alone = config.actor.lora_dim > 0 and config.classic.only_optimize_lora
    if engine.takes_adapter and not adapter_alone:
        raise ValueError(
            f"--rollout_engine {name} sends the actor's adapter to the engine, but all weights "
            "are trained: give --actor_lora_dim, without --no-only_optimize_lora"
        )
    engine.check(config, inputs)
    return config


# In this order: the first that fails is the one a user reads.
RLHF_CHECKS: tuple[Check[RlhfConfig, Inputs], ...] = (
    with_bundled_prompts,
    lambda config, _: through_addons(config, "check_reference"),
    check_rewards,
    with_rank_of_critic,
    with_continued_adapters,
    check_lora,
    with_fitting_lengths,
    with_overlong_punishment,
    with_base_bits,
    check_context_parallel,
    check_parallel,
    check_num_generations,
    check_vocabularies,
    lambda config, _: through_addons(config, "before_data"),
    check_data,
    with_deepspeed_json,
    with_default_responses,
    with_whole_steps,
    check_iterations,
    check_zero_stages,
    with_recomputation,
    check_output_dir,
    check_sources_are_kept,
    lambda config, _: through_addons(config, "check"),
    with_rollout_engine,
    announce,
    note_options,
)
