"""Everything that can be found wrong in step 3's options before anything heavy is imported."""

from dataclasses import replace
from typing import Any

from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.checkpoint.adapter_config import verify_adapter
from dschat_lora.config.groups import BatchConfig, DataConfig, ModelConfig, OptimConfig
from dschat_lora.data.rows import check_sources
from dschat_lora.engine.ds_config import reconcile
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.models.tensor_parallel_checks import check_processes, check_training
from dschat_lora.report.terminal import log_once
from dschat_lora.rlhf.config import (
    PromptConfig,
    RlhfConfig,
    RoleConfig,
    check_function,
    option_errors_for,
)
from dschat_lora.runtime.resume import launched_processes, settle
from dschat_lora.runtime.validation import (
    check_compile,
    check_divided,
    check_nothing_read_is_deleted,
    check_output_dir,
    check_task,
    continued_lora,
    is_first_rank,
    model_fields,
    parallel_without_effect,
    with_tensorboard,
)

NAME = "rlhf"
BUNDLED_LENGTHS = {"max_prompt_seq_len": 64, "max_answer_seq_len": 48}
BUNDLED_REWARD = "dschat_lora.world:reward"
# Options of DeepSpeed-Chat that need nothing here.
_UNUSED = (
    *("actor_dropout", "critic_dropout", "num_padding_at_beginning", "align_overflow"),
    *("offload_reference_model", "offload_reward_model", "enable_hybrid_engine"),
    *("unpin_actor_parameters", "release_inference_cache", "tp_gather_partition_size"),
    *("enable_mixed_precision_lora", "eval_iters", "print_loss"),
)


def check_rlhf(config: RlhfConfig) -> RlhfConfig:
    """The config of step 3 with paths, bundled defaults and the DeepSpeed JSON applied.

    As for the other stages (:func:`dschat_lora.runtime.validation.check_supervised`).

    Raises:
        ValueError: at the first thing that cannot work, naming option, value and remedy.
    """
    if config.checkpoint is None:
        if config.run.resume_from_checkpoint and not is_first_rank():
            return config
        config = settle(config, stage=NAME)
    asked = config
    config = _with_bundled(config)
    actor, critic = find_sources(config)
    _check_rewards(config, critic)
    config = replace(
        config,
        actor=_settled_role(config, "actor", actor),
        critic=_settled_critic(config, actor, critic),
        data=_fitting(config, [actor, *([critic] if critic is not None else [])]),
    )
    _check_tensor_parallel(config, actor, critic)
    _check_algorithm(config)
    check_sources(config.data.data, "prompts")
    check_sources_of_text(config)
    config = _with_steps(_reconciled(config))
    _check_kl_horizon(config)
    _check_tokens(config)
    if config.load.attn_implementation == "flex_attention":
        raise ValueError(
            "--attn_implementation flex_attention does not decode: step 3 takes sdpa or eager"
        )
    _check_zero_stages(config)
    check_compile(config.load, config.actor.zero_stage, config.critic.zero_stage)
    config = replace(config, run=with_tensorboard(config.run))
    check_output_dir(config)
    for role, source in (("actor", actor), ("critic", critic)):
        if source is not None:
            with option_errors_for(role):
                check_nothing_read_is_deleted(config.run, source)
    _announce(config, asked, actor, critic)
    for note in _without_effect(config, critic):
        log_once(f"  note         {note}")
    return config


def find_sources(config: RlhfConfig) -> tuple[ModelSource, ModelSource | None]:
    """Actor and critic; None where nothing but a function scores.

    Raises:
        ValueError: naming the role's option.
    """
    with option_errors_for("actor"):
        actor = find_model(config.actor.model_name_or_path)
        _check(actor, "CAUSAL_LM")
    if config.critic.model_name_or_path is None:
        return actor, None
    with option_errors_for("critic"):
        critic = find_model(config.critic.model_name_or_path)
        _check(critic, "SEQ_CLS")
    return actor, critic


def text_data(config: RlhfConfig) -> DataConfig | None:
    """The pretraining text as data to train on, if any is to be mixed in."""
    name, more = (
        config.pretraining.unsupervised_dataset_name,
        config.pretraining.unsupervised_dataset_config_name,
    )
    if name is None:
        return None
    return DataConfig(
        data_path=(f"{name}:{more}" if more else name,),
        eval_ratio=0.0,
        data_output_path=config.data.data_output_path,
        overlong="truncate",
        bad_rows=config.data.bad_rows,
        preprocessing_num_workers=config.data.preprocessing_num_workers,
        max_seq_len=config.data.max_seq_len,
        train_on_prompt=True,
    )


def check_sources_of_text(config: RlhfConfig) -> None:
    """Refuse pretraining text that cannot be read.

    Raises:
        ValueError: naming option and file.
    """
    data = text_data(config)
    if data is not None:
        try:
            check_sources(data)
        except ValueError as error:
            words = str(error).replace("--data_path", "--unsupervised_dataset_name")
            raise ValueError(words) from error


def _with_bundled(config: RlhfConfig) -> RlhfConfig:
    """Bundled prompts where none are named; the world's own judge where nothing scores."""
    if not config.data.data_path:
        lengths: dict[str, Any] = {
            n: v for n, v in BUNDLED_LENGTHS.items() if n not in config.given
        }
        data = replace(
            config.data,
            data_path=(str(BUNDLED_DATA["train"]),),
            eval_data_path=config.data.eval_data_path or (str(BUNDLED_DATA["eval"]),),
            **lengths,
        )
        nothing_named = config.actor.model_name_or_path is None
        if nothing_named and not _scores(config):
            rewards = replace(config.rewards, reward_function=BUNDLED_REWARD)
            config = replace(config, rewards=rewards)
        config = replace(config, data=data)
    return config


def _scores(config: RlhfConfig) -> bool:
    return bool(config.critic.model_name_or_path or config.rewards.reward_function)


def _check(source: ModelSource, task: str) -> None:
    if source.adapter is not None and is_first_rank():
        verify_adapter(source.adapter)
    check_task(source, (task,))


def _check_rewards(config: RlhfConfig, critic: ModelSource | None) -> None:
    if not _scores(config):
        raise ValueError(
            "--critic_model_name_or_path must name a reward model (the output of step 2), or "
            "--reward_function a function that scores: nothing tells what a response is worth"
        )
    for option in ("reward_function", "judge_function"):
        name = getattr(config.rewards, option)
        if name is not None:
            check_function(option, name)


def _settled_role(config: RlhfConfig, role: str, source: ModelSource) -> RoleConfig:
    """The role's options with those of the adapter that it continues."""
    options: RoleConfig = getattr(config, role)
    prefix = f"{role}_"
    given = frozenset(n.removeprefix(prefix) for n in config.given if n.startswith(prefix))
    with option_errors_for(role):
        lora = continued_lora(options.lora(config.classic.only_optimize_lora), source, given)
    return replace(
        options,
        lora_dim=lora.lora_dim,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
    )


def _settled_critic(
    config: RlhfConfig, actor: ModelSource, critic: ModelSource | None
) -> RoleConfig:
    """The critic's options; without a reward model it starts from the actor, as the actor does."""
    if critic is not None:
        return _settled_role(config, "critic", critic)
    if "critic_lora_dim" not in config.given and actor.adapter is None:
        return replace(config.critic, lora_dim=config.actor.lora_dim)
    return _settled_role(config, "critic", actor)


def _fitting(config: RlhfConfig, sources: list[ModelSource]) -> PromptConfig:
    """Lengths that the models have positions for.

    Raises:
        ValueError: where the user chose longer ones.
    """
    data, given = config.data, config.given
    found = [model_fields(source) for source in sources]
    limits = [f.get("max_position_embeddings") or f.get("n_positions") for f in found]
    limit = min((n for n in limits if isinstance(n, int)), default=data.max_seq_len)
    if data.max_seq_len <= limit:
        return data
    if given & BUNDLED_LENGTHS.keys():
        raise ValueError(
            f"--max_prompt_seq_len {data.max_prompt_seq_len} and --max_answer_seq_len "
            f"{data.max_answer_seq_len} need {data.max_seq_len} positions, the models have {limit}"
        )
    return replace(data, max_prompt_seq_len=limit - limit // 2, max_answer_seq_len=limit // 2)


def _check_tensor_parallel(
    config: RlhfConfig, actor: ModelSource, critic: ModelSource | None
) -> None:
    """Refuse models that the processes cannot divide, or cannot train once they are divided."""
    size, only_adapters = config.parallel.tensor_parallel_size, config.classic.only_optimize_lora
    check_processes(size, launched_processes())
    for role, source in (("actor", actor), ("critic", critic)):
        options: RoleConfig = getattr(config, role)
        with option_errors_for(role):
            if role == "actor" or config.has_critic:
                check_training(config.load, options.lora(only_adapters), size)
            if source is not None:
                check_divided(source, config.parallel)


def _check_algorithm(config: RlhfConfig) -> None:
    algorithm, k = config.ppo.algorithm, config.batch.num_generations
    if algorithm != "ppo" and k < 2:
        raise ValueError(
            f"--algorithm {algorithm} compares the responses to a prompt: --num_generations must "
            f"be 2 or more, got {k}"
        )


def _check_kl_horizon(config: RlhfConfig) -> None:
    batch, shares = config.batch, config.parallel.shares(launched_processes())
    responses = batch.per_device_generation_batch_size * batch.generation_batches * shares
    horizon = config.ppo.kl_horizon
    if config.ppo.adaptive_kl_target and 5 * horizon <= responses:
        raise ValueError(
            f"--kl_horizon {horizon} is too short for {responses} responses an iteration: the "
            f"coefficient could change its sign; use more than {responses // 5}"
        )


def _check_tokens(config: RlhfConfig) -> None:
    tokens, longest = config.batch.tokens_per_device, config.data.max_seq_len
    if 0 < tokens < longest:
        raise ValueError(
            f"--tokens_per_device {tokens} is less than a prompt and its answer may take; it must "
            f"be {longest} or more (--max_prompt_seq_len {config.data.max_prompt_seq_len} + "
            f"--max_answer_seq_len {config.data.max_answer_seq_len})"
        )


def _reconciled(config: RlhfConfig) -> RlhfConfig:
    """With what --deepspeed_config says filled in."""
    names = {"per_device_training_batch_size": "per_device_train_batch_size"}
    model, batch, optim, parallel = reconcile(
        ModelConfig(**vars(config.load)),
        BatchConfig(
            per_device_train_batch_size=config.batch.per_device_training_batch_size,
            gradient_accumulation_steps=config.batch.gradient_accumulation_steps,
        ),
        OptimConfig(**vars(config.optim)),
        config.parallel,
        given=frozenset(names.get(name, name) for name in config.given),
        world_size=launched_processes(),
    )
    stage = parallel.zero_stage or 0
    return replace(
        config,
        load=replace(config.load, dtype=model.dtype),
        batch=replace(
            config.batch,
            per_device_training_batch_size=batch.per_device_train_batch_size,
            gradient_accumulation_steps=batch.gradient_accumulation_steps,
        ),
        optim=replace(config.optim, max_grad_norm=optim.max_grad_norm),
        parallel=parallel,
        actor=_with_stage(config.actor, stage),
        critic=_with_stage(config.critic, stage),
    )


def _with_stage(role: RoleConfig, stage: int) -> RoleConfig:
    return role if role.zero_stage is not None else replace(role, zero_stage=stage)  # type: ignore[arg-type]


def _with_steps(config: RlhfConfig) -> RlhfConfig:
    """With as many responses an iteration as a step wants, and as many steps as a test wants."""
    batch, shares = config.batch, config.parallel.shares(launched_processes())
    wanted = batch.per_device_training_batch_size * batch.gradient_accumulation_steps
    if wanted > batch.per_device_generation_batch_size * batch.generation_batches:
        times = -(-wanted // batch.per_device_generation_batch_size)
        log_once(
            f"  note         --generation_batches {times}: a step of {wanted * shares} "
            "responses needs as many of one policy"
        )
        batch = replace(batch, generation_batches=times)
    optim = config.optim
    if config.classic.enable_test_mode:
        optim = replace(optim, max_steps=config.classic.test_stop_step)
    return replace(config, batch=batch, optim=optim)


def _check_zero_stages(config: RlhfConfig) -> None:
    actor, critic = config.actor.zero_stage, config.critic.zero_stage
    if config.has_critic and (actor == 3) != (critic == 3) and shares_base(config):
        raise ValueError(
            f"--actor_zero_stage {actor} and --critic_zero_stage {critic}: actor and critic share "
            "the weights of one base, which are sharded for both (3) or for neither"
        )


def shares_base(config: RlhfConfig) -> bool:
    """Whether actor and critic stand on the same frozen weights."""
    if not config.classic.only_optimize_lora:
        return False
    if not (config.actor.lora_dim and config.critic.lora_dim):
        return False
    actor, critic = find_sources(config)
    return critic is None or (critic.adapter is not None and critic.base == actor.base)


def _announce(
    config: RlhfConfig, asked: RlhfConfig, actor: ModelSource, critic: ModelSource | None
) -> None:
    """Say on the first line what learns from what."""

    def name(source: ModelSource) -> str:
        base = "the bundled tiny model" if source.bundled else source.base
        return base + (f" with the adapter {source.adapter}" if source.adapter else "")

    function = config.rewards.reward_function
    by = [name(critic)] if critic is not None else []
    by += [f"the function {function}"] if function else []
    bundled = config.data.data_path != asked.data.data_path
    data = "the bundled prompts" if bundled else " ".join(config.data.data_path)
    log_once(f"actor: {name(actor)}; reward: {' and '.join(by)}; data: {data}")


def _without_effect(config: RlhfConfig, critic: ModelSource | None) -> list[str]:
    """A line for each option that was given and changes nothing."""
    given = config.given
    notes = [f"--{name} has no effect here: see --help" for name in _UNUSED if name in given]
    notes += parallel_without_effect(config.parallel)
    if not config.has_critic:
        unused = sorted(n for n in given if n.startswith("critic_") and "model" not in n)
        unused += sorted({"cliprange_value", "gamma", "lam", "whiten_advantages"} & given)
        notes += [f"--{name} has no effect without a critic" for name in unused]
    for role in ("actor", "critic"):
        options: RoleConfig = getattr(config, role)
        frozen = options.lora_dim > 0 and config.classic.only_optimize_lora
        if frozen and f"{role}_learning_rate" in given:
            notes.append(
                f"--{role}_learning_rate has no effect: the adapter alone trains, at "
                f"--{role}_lora_learning_rate"
            )
        if not options.lora_dim and f"{role}_lora_learning_rate" in given:
            notes.append(f"--{role}_lora_learning_rate has no effect without --{role}_lora_dim")
    if not config.batch.do_sample:
        unused = sorted({"top_p", "top_k"} & given)
        notes += [f"--{name} has no effect with --no-do_sample" for name in unused]
    return notes
