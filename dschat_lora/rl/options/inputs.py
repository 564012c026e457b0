"""Models and text that step 3 starts from, and what its first lines say of them and of options."""

from dataclasses import dataclass
from pathlib import Path

from dschat_lora.config.addons import groups_of
from dschat_lora.config.data import DataConfig
from dschat_lora.config.files import read_json
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import say_once
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.runtime.checks import find_of_kind, model_name, note_without_effect
from dschat_lora.runtime.validation import Inputs


@dataclass(frozen=True)
class Sources:
    """Pretrained models and adapters of the roles."""

    actor: ModelSource
    critic: ModelSource | None  # None: values start from the actor, and a function scores
    reference: ModelSource | None = None  # None: it is the actor as it was, or elsewhere
    reference_role: str = "reference"  # its name of options

    @property
    def by_role(self) -> dict[str, ModelSource]:
        """Those that are there."""
        roles = {"actor": self.actor, "critic": self.critic, self.reference_role: self.reference}
        return {role: source for role, source in roles.items() if source is not None}

    def of(self, role: str) -> ModelSource:
        """The role's own, or the actor's."""
        return self.by_role.get(role, self.actor)


RlhfInputs = Inputs[Sources]


def find_sources(config: RlhfConfig) -> Sources:
    """Actor, critic and a reference of its own; a ValueError names the role's option."""

    def find(role: str, name: str | None, task: str = "CAUSAL_LM") -> ModelSource:
        return find_of_kind(name, (task,), option=f"--{role}_model_name_or_path")

    actor = find("actor", config.actor.model_name_or_path)
    name, own = config.critic.model_name_or_path, config.reference
    critic = None if name is None else find("critic", name, "SEQ_CLS")
    if own is None or own.is_served or own.model_name is None:
        return Sources(actor, critic)
    return Sources(actor, critic, find(own.role, own.model_name), own.role)


def check_vocabularies(config: RlhfConfig, inputs: RlhfInputs) -> None:
    """Refuse a reward model or reference whose files have another vocabulary than the actor's.

    Other differences of tokenizers show once they are loaded.
    """
    mine = Path(inputs.sources.actor.tokenizer) / "tokenizer.json"
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
        name, remedy = config.reference.model_name, "take one of the actor's family"
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
    actor, critic = sources.actor, sources.critic
    if critic is None:
        return True
    bits = {config.load.base_bits or each.base_bits or 16 for each in (critic, actor)}
    return critic.adapter is not None and critic.base == actor.base and len(bits) == 1


def announce(config: RlhfConfig, inputs: RlhfInputs) -> None:
    """Log the models, the reward and the data on the first line; the first rank alone."""
    actor, critic = inputs.sources.actor, inputs.sources.critic
    by = [model_name(critic)] if critic is not None else []
    by += [f"the function {function}" for function in config.rewards.reward_function]
    by = by or [own.described() for own in config.players]
    source, reference = "reward", inputs.sources.reference
    if (own := config.reference) is not None:
        known = "the actor as it was" if reference is None else model_name(reference)
        source, by = own.role, [own.model_name or known if own.is_served else known]
    bundled = config.data.data_path != inputs.asked
    data = "the bundled prompts" if bundled else " ".join(config.data.data_path)
    for own in groups_of(config, "described_data"):
        data = own.described_data() or data
    say_once(f"actor: {model_name(actor)}; {source}: {' and '.join(by)}; data: {data}")
    for own in groups_of(config, "first_lines"):
        for line in own.first_lines(config):
            say_once(line)


def note_options(config: RlhfConfig, inputs: RlhfInputs) -> None:
    """Log a note on each option that changes nothing, or does other than it seems to."""
    note_without_effect(config)
    if (config.ppo.kl_in, config.ppo.kl_estimator) == ("loss", "k1") and config.ppo.kl_coef:
        say_once(
            "  note         --kl_estimator k1 in the loss holds the actor nowhere, as its gradient "
            "is 0 on average: use k2 or k3, or --kl_in reward"
        )
    batch = config.batch
    if batch.do_sample and not batch.draws_from_policy and config.ppo.correction is None:
        say_once(
            "  note         --top_p and --top_k draw from another distribution than the one that "
            "learns: --importance_cap 2 weighs tokens for the difference"
        )
