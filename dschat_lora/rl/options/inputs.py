"""Models and text that step 3 starts from, and what its first lines say of them and of options."""

from pathlib import Path

from dschat_lora.config.addons import groups_of
from dschat_lora.config.data import DataConfig
from dschat_lora.config.files import read_json
from dschat_lora.config.held import PREFIX, rows_in_words
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import say_once
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.checks import find_of_kind, model_name, note_without_effect
from dschat_lora.runtime.validation import Inputs, Sources


def find_sources(config: RlhfConfig) -> Sources:
    """Actor, critic and a reference of its own; a ValueError names the role's option."""

    def find(role: str, name: str | None, task: str = "CAUSAL_LM") -> ModelSource:
        return find_of_kind(name, (task,), option=f"--{role}_model_name_or_path")

    sources = {"actor": find("actor", config.actor.model_name_or_path)}
    if (name := config.critic.model_name_or_path) is not None:
        sources["critic"] = find("critic", name, "SEQ_CLS")
    own = config.reference
    if own is not None and own.model_name is not None and not own.is_served:
        sources[own.role] = find(own.role, own.model_name)
    return Sources(sources)


def check_vocabularies(config: RlhfConfig, inputs: Inputs) -> None:
    """Refuse a reward model or reference whose files have another vocabulary than the actor's.

    Other differences of tokenizers show once they are loaded.
    """
    mine = Path(inputs.sources.of("actor").tokenizer) / "tokenizer.json"
    for role, source in inputs.sources.by_role.items():
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
    """What is wrong with a reward model or reference of another tokenizer than the actor's."""
    name, remedy = config.critic.model_name_or_path, "train it on a base of that family"
    if config.reference is not None and role == config.reference.role:
        name, remedy = config.reference.model_name, "choose one of the actor's family"
    return (
        f"--{role}_model_name_or_path {name} has another tokenizer than "
        f"--actor_model_name_or_path {config.actor.model_name_or_path or '(bundled)'}: it would "
        f"read different tokens than the actor wrote; {remedy}"
    )


def text_data(config: RlhfConfig) -> DataConfig | None:
    """The pretraining text as data to train on, if any is to be mixed in."""
    name = config.pretraining.unsupervised_dataset_name
    more = config.pretraining.unsupervised_dataset_config_name
    if name is None:
        return None
    kept = (
        *("data_output_path", "bad_rows", "unpaired_rows", "preprocessing_num_workers"),
        *("chat_template_kwargs", "max_seq_len", "tail"),
    )
    return DataConfig(
        **{each: getattr(config.data, each) for each in kept},
        data_path=(f"{name}:{more}:train" if more else name,),
        eval_ratio=0.0,
        overlong="truncate",
        train_on_prompt=True,
    )


def shares_base(config: RlhfConfig, sources: Sources) -> bool:
    """Whether actor and critic share the frozen weights of one base."""
    if not (config.classic.only_optimize_lora and config.actor.lora_dim and config.critic.lora_dim):
        return False
    actor, critic = sources.of("actor"), sources.by_role.get("critic")
    if critic is None:
        return True
    bits = {config.load.base_bits or each.base_bits or 16 for each in (critic, actor)}
    return critic.adapter is not None and critic.base == actor.base and len(bits) == 1


def announce(config: RlhfConfig, inputs: Inputs) -> None:
    """Log the models, the reward and the data on the first line; the first rank alone."""
    actor, critic = inputs.sources.of("actor"), inputs.sources.by_role.get("critic")
    by = [model_name(critic)] if critic is not None else []
    by += [
        f"the function {function.removeprefix(PREFIX)}"
        for function in config.rewards.reward_function
    ]
    by = by or [own.described() for own in config.players]
    source = "reward"
    if (own := config.reference) is not None:
        reference = inputs.sources.by_role.get(own.role)
        known = "the initial actor" if reference is None else model_name(reference)
        source, by = own.role, [own.model_name or known if own.is_served else known]
    bundled = config.data.data_path != inputs.asked
    data = "the bundled prompts" if bundled else " ".join(map(rows_in_words, config.data.data_path))
    for own in groups_of(config, "described_data"):
        data = own.described_data() or data
    say_once(f"actor: {model_name(actor)}; {source}: {' and '.join(by)}; data: {data}")
    for own in groups_of(config, "first_lines"):
        for line in own.first_lines(config):
            say_once(line)


def note_options(config: RlhfConfig, inputs: Inputs) -> None:
    """Log a note on each option that changes nothing, or does other than it seems to."""
    note_without_effect(config)
    if (config.ppo.kl_in, config.ppo.kl_estimator) == ("loss", "k1") and config.ppo.kl_coef:
        say_once(
            "  note         --kl_estimator k1 in the loss does not constrain the actor, as its "
            "gradient is 0 on average: use k2 or k3, or --kl_in reward"
        )
    batch = config.batch
    if batch.do_sample and not batch.draws_from_policy and config.ppo.correction is None:
        say_once(
            "  note         --top_p and --top_k sample from a different distribution than the "
            "trained one: --importance_cap 2 corrects this with importance weights"
        )
