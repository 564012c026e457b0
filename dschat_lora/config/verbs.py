"""Options of the verbs that read models, merge and generate, and how a verb's are parsed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dschat_lora.config.addons import addon_options
from dschat_lora.config.data import parse_columns
from dschat_lora.config.groups import ModelConfig, Switch, require, require_numbers
from dschat_lora.config.options import given_options, group, option, parse_config
from dschat_lora.config.stages import InferenceConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
_TRAINED = (
    "output directory of a run, its adapter/ or model/, a checkpoint, or a hub name; it may stand "
    "first, without the option"
)


@dataclass(frozen=True)
class MergeConfig:
    """Merge an adapter into its base model, and measure the effect of rounding."""

    model_name_or_path: str = option(help=_TRAINED)
    output_dir: str | None = option(
        None, help="output directory; default: model/ next to the adapter"
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto",
        help="dtype of the saved weights; auto: that in which the base is stored",
    )
    merge_max_kl: float = option(
        0.01,
        help="refuse a merge that changes the output distribution by more than this KL divergence "
        "(nats per token)",
    )
    overwrite_output_dir: bool = option(False, help="overwrite a model in the output directory")
    base_bits: Literal[16, 4] | None = option(
        None,
        help="bits of the base that the adapter is merged into: 16, or 4 (NF4); default: those it "
        "was trained on; the merged weights are never quantised",
    )
    trust_remote_code: bool = option(False, help="allow running model code from a hub repository")
    json: bool = option(False, help="print one JSON object to standard output")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "merge_max_kl")

    @property
    def model(self) -> ModelConfig:
        """Options of loading the model."""
        return ModelConfig(
            model_name_or_path=self.model_name_or_path,
            base_bits=self.base_bits,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True)
class ReadingConfig:
    """A trained model, and rows to try it on."""

    model_name_or_path: str = option(help=_TRAINED)
    data_path: tuple[str, ...] = option(
        (), help="files (.jsonl .json .csv .parquet .arrow .txt), directories, or hub data sets"
    )
    columns: tuple[str, ...] = option(
        (), help="names of columns, as in prompt=question completion=answer"
    )
    max_seq_len: int = option(
        0, help="maximum sequence length in tokens; 0: the model's number of positions"
    )
    per_device_eval_batch_size: int = option(16, help="batch size")
    loading: InferenceConfig = group(InferenceConfig)

    def __post_init__(self) -> None:
        parse_columns(self.columns)
        require_numbers(self, ">= 0", "max_seq_len")
        require_numbers(self, ">= 1", "per_device_eval_batch_size")

    @property
    def model(self) -> ModelConfig:
        """Options of loading the model."""
        return self.loading.model(self.model_name_or_path)


@dataclass(frozen=True)
class GenerateConfig(ReadingConfig):
    """Answer the prompts of the command line or of files, by default with greedy decoding."""

    prompts: tuple[str, ...] = option(
        (), help="prompts to complete; may be given after the model, without the option"
    )
    output_path: str | None = option(None, help="JSONL file to write; default: standard output")
    json: bool = option(False, help="print JSON to standard output")
    chat: bool = option(False, help="send --prompts as user messages through the chat template")
    max_new_tokens: int = option(128, help="maximum number of tokens of an answer")
    do_sample: Switch = option(
        "auto",
        help="sample tokens instead of greedy decoding; auto: if --temperature, --top_p or --top_k "
        "is given",
    )
    temperature: float = option(1.0, help="sampling temperature")
    top_p: float = option(
        1.0, help="sample from the most likely tokens with this total probability"
    )
    top_k: int = option(0, help="sample from this many most likely tokens; 0: all")
    num_return_sequences: int = option(1, help="number of sampled answers per prompt")
    seed: int = option(1234, help="random seed of sampling")
    addons: Any = group(addon_options("generate"))
    given: frozenset[str] = given_options()

    def __post_init__(self) -> None:
        super().__post_init__()
        given = bool(self.prompts) or bool(self.data_path)
        require(given, "prompts", "nothing", "texts, or --data_path a file of prompts")
        require_numbers(self, ">= 1", "max_new_tokens", "num_return_sequences")
        require_numbers(self, ">= 1e-06 (greedy: --no-do_sample)", "temperature")
        require_numbers(self, ">= 0", "top_k")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        if not self.samples and self.num_return_sequences > 1:
            raise ValueError(
                f"--num_return_sequences {self.num_return_sequences} needs --do_sample: greedy "
                "answers are all the same"
            )

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, as an option of sampling asks for where none says it."""
        if isinstance(self.do_sample, bool):
            return self.do_sample
        return "temperature" in self.given or self.top_p < 1 or self.top_k > 0


# What the help of a verb ends with.
EXAMPLES: Mapping[str, str] = {
    "merge": """examples:
  dschat-lora merge output/sft              writes output/sft/model
  dschat-lora merge output/sft/checkpoints/step-00000500 --output_dir merged
  dschat-lora merge output/rlhf --dtype bf16 --json""",
    "generate": """examples:
  dschat-lora generate output/sft --chat "What is 2 plus 3?" "Name a fruit."
  dschat-lora generate output/sft --data_path q.jsonl --output_path a.jsonl
  dschat-lora generate output/sft "Once upon a time" --do_sample --top_p 0.9""",
}


def parsed_config(
    usage: str, config_class: type[ConfigT], argv: list[str], *more: str, examples: str
) -> ConfigT:
    """The options of a verb that reads a directory, whose name may stand first."""
    first = next(iter(config_class.__dataclass_fields__))
    return parse_config(
        config_class,
        argv,
        description=config_class.__doc__,
        program=f"dschat-lora {usage}",
        examples=examples,
        positionals=(first, *more),
    )
