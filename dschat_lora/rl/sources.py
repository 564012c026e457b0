"""Pretrained models and text that step 3 starts from."""

from dataclasses import dataclass
from pathlib import Path

from dschat_lora.config.data import DataConfig
from dschat_lora.config.files import read_json
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.rl.config import RlhfConfig
from dschat_lora.rl.role_config import option_errors_for
from dschat_lora.runtime.checks import check_adapter_files, check_task


@dataclass(frozen=True)
class Sources:
    """Pretrained models and adapters of the roles."""

    actor: ModelSource
    critic: ModelSource | None  # None: values start from the actor, and a function scores

    @property
    def by_role(self) -> dict[str, ModelSource]:
        """Those that are there."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})


@dataclass(frozen=True)
class RlhfInputs:
    """Inputs of the checks besides the config: the models found, and the data as typed."""

    sources: Sources
    asked: tuple[str, ...]


def find_sources(config: RlhfConfig) -> Sources:
    """Actor and critic.

    Raises:
        ValueError: naming the role's option.
    """
    actor = _find("actor", config.actor.model_name_or_path, "CAUSAL_LM")
    if config.critic.model_name_or_path is None:
        return Sources(actor, None)
    return Sources(actor, _find("critic", config.critic.model_name_or_path, "SEQ_CLS"))


def _find(role: str, name: str | None, task: str) -> ModelSource:
    with option_errors_for(role):
        source = find_model(name)
        check_adapter_files(source)
        check_task(source, (task,))
    return source


def check_vocabularies(config: RlhfConfig, sources: Sources) -> None:
    """Refuse a reward model whose files have another vocabulary than the actor's.

    Other differences of tokenizers show once they are loaded.

    Raises:
        ValueError: naming both options.
    """
    if sources.critic is None:
        return
    mine, other = (
        Path(each.tokenizer) / "tokenizer.json" for each in (sources.actor, sources.critic)
    )
    if not (mine.is_file() and other.is_file()) or mine.read_bytes() == other.read_bytes():
        return
    if _vocabulary(mine) != _vocabulary(other):
        raise ValueError(other_tokenizer(config))


def _vocabulary(path: Path) -> object:
    try:
        return read_json(path)["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def other_tokenizer(config: RlhfConfig) -> str:
    """What is wrong with a reward model of another tokenizer than the actor's."""
    return (
        f"--critic_model_name_or_path {config.critic.model_name_or_path} has another tokenizer "
        f"than --actor_model_name_or_path {config.actor.model_name_or_path or '(bundled)'}: it "
        "would read other tokens than the actor wrote; train it on a base of that family"
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
        overlong="truncate",
        bad_rows=config.data.bad_rows,
        unpaired_rows=config.data.unpaired_rows,
        preprocessing_num_workers=config.data.preprocessing_num_workers,
        max_seq_len=config.data.max_seq_len,
        train_on_prompt=True,
        chat_template_kwargs=config.data.chat_template_kwargs,
    )


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
