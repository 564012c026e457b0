"""Models and text that step 3 starts from, and what its first lines say of them and of options."""

from dataclasses import dataclass, replace
from pathlib import Path

from dschat_lora.config.data import DataConfig
from dschat_lora.config.files import read_json
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.report.terminal import note_once, say_once
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.role_config import RoleConfig, option_errors_for
from dschat_lora.runtime.checks import (
    check_adapter_files,
    check_task,
    model_name,
    parallel_without_effect,
)


@dataclass(frozen=True)
class Sources:
    """Pretrained models and adapters of the roles."""

    actor: ModelSource
    critic: ModelSource | None  # None: values start from the actor, and a function scores
    teacher: ModelSource | None = None  # None: the reference is the actor as it was

    @property
    def by_role(self) -> dict[str, ModelSource]:
        """Those that are there."""
        found = {"actor": self.actor, "critic": self.critic, "teacher": self.teacher}
        return {role: source for role, source in found.items() if source is not None}


@dataclass(frozen=True)
class RlhfInputs:
    """Inputs of the checks besides the config: the models found, and the data as typed."""

    sources: Sources
    asked: tuple[str, ...]


def episode_prompt(number: int) -> list[dict[str, str]]:
    """The prompt of an episode of ``--num_prompts``, in whose place comes what ``reset`` says."""
    return [{"role": "user", "content": f"Episode {number}"}]


def find_sources(config: RlhfConfig) -> Sources:
    """Actor, critic and teacher.

    Raises:
        ValueError: naming the role's option.
    """
    critic, teacher = config.critic.model_name_or_path, config.teacher.teacher_model_name_or_path
    return Sources(
        _find("actor", config.actor.model_name_or_path, "CAUSAL_LM"),
        None if critic is None else _find("critic", critic, "SEQ_CLS"),
        None
        if teacher is None or config.teacher.server
        else _find("teacher", teacher, "CAUSAL_LM"),
    )


def _find(role: str, name: str | None, task: str) -> ModelSource:
    with option_errors_for(role):
        source = find_model(name)
        check_adapter_files(source)
        check_task(source, (task,))
    return source


def check_vocabularies(config: RlhfConfig, sources: Sources) -> None:
    """Refuse a reward model or teacher whose files have another vocabulary than the actor's.

    Other differences of tokenizers show once they are loaded.

    Raises:
        ValueError: naming both options.
    """
    mine = Path(sources.actor.tokenizer) / "tokenizer.json"
    for role, source in sources.by_role.items():
        other = Path(source.tokenizer) / "tokenizer.json"
        if not (mine.is_file() and other.is_file()) or mine.read_bytes() == other.read_bytes():
            continue
        if _vocabulary(mine) != _vocabulary(other):
            raise ValueError(other_tokenizer(config, role))


def _vocabulary(path: Path) -> object:
    try:
        return read_json(path)["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def other_tokenizer(config: RlhfConfig, role: str) -> str:
    """What is wrong with a reward model or teacher of another tokenizer than the actor's."""
    name, remedy = config.critic.model_name_or_path, "train it on a base of that family"
    if role == "teacher":
        name, remedy = config.teacher.teacher_model_name_or_path, "take one of the actor's family"
    return (
        f"--{role}_model_name_or_path {name} has another tokenizer than "
        f"--actor_model_name_or_path {config.actor.model_name_or_path or '(bundled)'}: it "
        f"would read other tokens than the actor wrote; {remedy}"
    )


def text_data(config: RlhfConfig) -> DataConfig | None:
    """The pretraining text as data to train on, if any is to be mixed in."""
    name = config.pretraining.unsupervised_dataset_name
    more = config.pretraining.unsupervised_dataset_config_name
    if name is None:
        return None
    return DataConfig(
        data_path=(f"{name}:{more}:train" if more else name,),
        eval_ratio=0.0,
        data_output_path=config.data.data_output_path,
        streaming=config.data.streaming,
        shuffle_buffer_size=config.data.shuffle_buffer_size,
        overlong="truncate",
        bad_rows=config.data.bad_rows,
        unpaired_rows=config.data.unpaired_rows,
        preprocessing_num_workers=config.data.preprocessing_num_workers,
        max_seq_len=config.data.max_seq_len,
        train_on_prompt=True,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


def answers_data(config: RlhfConfig) -> DataConfig:
    """The data with its own answers, which the run takes as many of as it needs."""
    data = replace(config.data.data, max_seq_len=config.data.max_seq_len, max_repeats=())
    if data.eval_data_path:  # prompts, which need no answers
        data = replace(data, eval_data_path=(), eval_ratio=0.0)
    return data


def shares_base(config: RlhfConfig) -> bool:
    """Whether actor and critic share the frozen weights of one base."""
    if not config.classic.only_optimize_lora:
        return False
    if not (config.actor.lora_dim and config.critic.lora_dim):
        return False
    sources = find_sources(config)
    critic = sources.critic
    if critic is None:
        return True
    bits = {config.load.base_bits or each.base_bits or 16 for each in (critic, sources.actor)}
    return critic.adapter is not None and critic.base == sources.actor.base and len(bits) == 1


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
    actor, critic, teacher = (getattr(inputs.sources, r) for r in ("actor", "critic", "teacher"))
    by = [model_name(critic)] if critic is not None else []
    by += [f"the function {function}" for function in functions]
    agent = config.batch.agent or config.batch.agent_command
    by = by or [
        f"the environment {config.batch.environment}" if agent is None else f"the agent {agent}"
    ]
    source = "reward"
    if config.ppo.rules.distills:
        known = "the actor as it was" if teacher is None else model_name(teacher)
        served = config.teacher.server and config.teacher.teacher_model_name_or_path
        source, by = "teacher", [served or known]
    bundled = config.data.data_path != inputs.asked
    data = "the bundled prompts" if bundled else " ".join(config.data.data_path)
    if config.data.num_prompts:
        data = f"{config.data.num_prompts:,} episodes without data"
    say_once(f"actor: {model_name(actor)}; {source}: {' and '.join(by)}; data: {data}")
    ahead = config.batch.rollouts_ahead
    if config.batch.rollout_engine == "vllm":
        say_once(
            f"  rollouts     vLLM takes up to {config.batch.vllm_gpu_memory_utilization:.0%} of "
            f"each GPU's memory{'' if ahead else ' while it draws'}, or of the host's"
        )
    if ahead:
        weighs = f"weighed by --rollout_correction {config.ppo.rollout_correction or 'tis'}"
        if config.ppo.rules.distills and config.teacher.beta is not None:
            weighs = f"for which --distill_loss {config.teacher.distill_loss} has no weights"
        say_once(f"  rollouts     up to {ahead} iterations ahead, by adapters as old, {weighs}")


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
        own = options.lora_learning_rate
        if (
            frozen
            and f"{role}_learning_rate" in given
            and options.learning_rate not in ("auto", own)  # or it is the adapter's
        ):
            note_once(
                f"--{role}_learning_rate has no effect: the adapter alone trains, at "
                f"--{role}_lora_learning_rate {own:g}"
            )
        if not options.lora_dim and f"{role}_lora_learning_rate" in given:
            notes.append(f"--{role}_lora_learning_rate has no effect without --{role}_lora_dim")
    if (config.ppo.kl_in, config.ppo.kl_estimator) == ("loss", "k1") and config.ppo.kl_coef:
        notes.append(
            "--kl_estimator k1 in the loss holds the actor nowhere, as its gradient is 0 on "
            "average: use k2 or k3, or --kl_in reward"
        )
    if config.ppo.rules.distills:
        unused = sorted(given & {"kl_coef", "kl_in", "kl_estimator", "reward_weights"})
        notes += [f"--{name} has no effect: the teacher alone is learnt from" for name in unused]
        if "jsd_beta" in given and config.teacher.distill_loss != "jsd":
            notes.append("--jsd_beta has no effect without --distill_loss jsd")
    notes += _of_sampling(config)
    for note in notes:
        say_once(f"  note         {note}")


def _of_sampling(config: RlhfConfig) -> list[str]:
    """Notes on how responses are drawn."""
    batch, given, notes = config.batch, config.given, []
    if batch.do_sample and not batch.draws_from_policy and config.ppo.correction is None:
        notes.append(
            "--top_p, --top_k and --rollout_temperature draw from another distribution than the "
            "one that learns: --importance_cap 2 weighs tokens for the difference"
        )
    if config.ppo.correction is None:
        unused = sorted(n for n in given if n.startswith("rollout_is"))
        notes += [f"--{name} has no effect without --rollout_correction" for name in unused]
    if not batch.do_sample:
        unused = sorted({"top_p", "top_k", "rollout_temperature"} & given)
        notes += [f"--{name} has no effect with --no-do_sample" for name in unused]
    if batch.rollout_engine != "vllm":
        unused = sorted({"vllm_command", "vllm_gpu_memory_utilization"} & given)
        notes += [f"--{name} has no effect without --rollout_engine vllm" for name in unused]
    if not batch.by_servers:
        others = {"rollout_timeout"} if config.teacher.server is None else set()
        unused = sorted(({"rollout_adapter_dir"} | others) & given)
        notes += [f"--{name} has no effect without servers of --rollout_engine" for name in unused]
    if batch.rollout_engine != "own":
        unused = sorted(
            n for n in ("merge_for_rollouts", "prompt_lookup_num_tokens") if getattr(batch, n)
        )
        notes += [f"--{name} has no effect without --rollout_engine own" for name in unused]
    if batch.environment is None and "max_turns" in given:
        notes.append("--max_turns has no effect without --environment")
    if not batch.has_agent:
        unused = sorted({"agent_timeout", "agent_retries", "agent_max_calls"} & given)
        notes += [f"--{name} has no effect without --agent or --agent_command" for name in unused]
    return notes
