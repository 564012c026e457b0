"""Options of texts that step 3 reads: prompts, and pretraining text beside them."""

from dataclasses import dataclass

from dschat_lora.config.data import DataConfig, SourceConfig
from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option


@dataclass(frozen=True)
class PromptConfig(SourceConfig):
    """Prompts and their length."""

    section = "data"

    max_prompt_seq_len: int = option(
        256, help="maximum number of tokens of a prompt; --overlong applies to longer ones"
    )
    max_answer_seq_len: int = option(256, help="maximum number of tokens of a response")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, ">= 1", "max_prompt_seq_len", "max_answer_seq_len")

    @property
    def max_seq_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self.max_prompt_seq_len + self.max_answer_seq_len

    @property
    def data(self) -> DataConfig:
        """The prompts as data to prepare."""
        source = {name: getattr(self, name) for name in SourceConfig.__dataclass_fields__}
        return DataConfig(**source, max_seq_len=max(2, self.max_prompt_seq_len), packing=False)


@dataclass(frozen=True)
class PretrainingConfig:
    """Pretraining text mixed into the update (PTX)."""

    section = "algorithm"

    unsupervised_dataset_name: str | None = option(
        None,
        help="pretraining text to mix in: files, a directory or a hub data set (name:config)",
    )
    unsupervised_dataset_config_name: str | None = option(
        None, help="configuration of a hub data set, as in name:configuration"
    )
    unsup_coef: float = option(
        27.8,
        help="coefficient of the pretraining loss per token, relative to the policy loss",
        when="unsupervised_dataset_name",
    )

    def __post_init__(self) -> None:
        require_numbers(self, "> 0", "unsup_coef")
        if self.unsupervised_dataset_config_name and not self.unsupervised_dataset_name:
            raise ValueError(
                f"--unsupervised_dataset_config_name {self.unsupervised_dataset_config_name} "
                "needs --unsupervised_dataset_name"
            )
