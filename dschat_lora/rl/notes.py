"""First lines of a run of step 3: models, reward and data, and options without effect."""

from dschat_lora.report.terminal import say_once
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.role_config import RoleConfig
from dschat_lora.rl.sources import RlhfInputs
from dschat_lora.runtime.checks import model_name, parallel_without_effect

# Options of DeepSpeed-Chat that need nothing here.
_UNUSED = (
    *("actor_dropout", "critic_dropout", "num_padding_at_beginning", "align_overflow"),
    *("offload_reference_model", "offload_reward_model", "enable_hybrid_engine"),
    *("unpin_actor_parameters", "tp_gather_partition_size"),
    *("enable_mixed_precision_lora", "eval_iters", "print_loss"),
)


def announce(config: RlhfConfig, inputs: RlhfInputs) -> None:
    """Log the models, the reward and the data on the first line; the first rank alone."""
    functions = config.rewards.reward_function
    actor, critic = inputs.sources.actor, inputs.sources.critic
    by = [model_name(critic)] if critic is not None else []
    by += [f"the function {function}" for function in functions]
    bundled = config.data.data_path != inputs.asked
    data = "the bundled prompts" if bundled else " ".join(config.data.data_path)
    say_once(f"actor: {model_name(actor)}; reward: {' and '.join(by)}; data: {data}")


def note_without_effect(config: RlhfConfig, inputs: RlhfInputs) -> None:
    """Log a note on each option that was given and changes nothing."""
    given = config.given
    notes = [f"--{name} has no effect here: see --help" for name in _UNUSED if name in given]
    notes += parallel_without_effect(config.parallel)
    size, training = config.classic.inference_tp_size, config.parallel.tensor_parallel_size
    if size not in (1, training):
        notes.append(
            f"--inference_tp_size {size} has no effect: rollouts run on the processes that hold "
            f"the model, {training} by --tensor_parallel_size"
        )
    if not config.has_critic:
        unused = sorted(n for n in given if n.startswith("critic_") and "model" not in n)
        of_gae = {"cliprange_value", "lam", "whiten_advantages"}
        of_gae |= {"gamma"} if config.ppo.rules.compares else set()
        unused += sorted(of_gae & given)
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
    if (config.ppo.kl_in, config.ppo.kl_estimator) == ("loss", "k1") and config.ppo.kl_coef:
        notes.append(
            "--kl_estimator k1 in the loss holds the actor nowhere, as its gradient is 0 on "
            "average: use k2 or k3, or --kl_in reward"
        )
    notes += _of_sampling(config)
    for note in notes:
        say_once(f"  note         {note}")


def _of_sampling(config: RlhfConfig) -> list[str]:
    """Notes on how responses are drawn."""
    batch, given, notes = config.batch, config.given, []
    if batch.do_sample and not (batch.draws_from_policy or config.ppo.importance_cap):
        notes.append(
            "--top_p, --top_k and --rollout_temperature draw from another distribution than the "
            "one that learns: --importance_cap 2 weighs tokens for the difference"
        )
    if not batch.do_sample:
        unused = sorted({"top_p", "top_k", "rollout_temperature"} & given)
        notes += [f"--{name} has no effect with --no-do_sample" for name in unused]
    if batch.environment is None and "max_turns" in given:
        notes.append("--max_turns has no effect without --environment")
    return notes
