"""Options of the verbs that read models, merge and generate, and how a verb's are parsed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dschat_lora.config.addons import addon_options
from dschat_lora.config.data import parse_columns
from dschat_lora.config.groups import ModelConfig, require, require_numbers
from dschat_lora.config.options import group, option, parse_config
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
    """Write base and adapter as one transformers directory, and measure what rounding changes."""

    model_name_or_path: str = option(help=_TRAINED)
    output_dir: str | None = option(None, help="default: model/ beside the adapter")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", help="type of the weights written; auto: the base's where it has 16 bits, else bf16"
    )
    merge_max_kl: float = option(
        0.01, help="refuse a merge that moves the distribution by more (nats per token)"
    )
    overwrite_output_dir: bool = option(False, help="replace a model in the output directory")
    base_bits: Literal[16, 4] | None = option(
        None,
        help="bits of the base to add the adapter to: 16, or 4 (NF4); by default those that it was "
        "trained on; whole weights are written in any case",
    )
    trust_remote_code: bool = option(False, help="run model code that comes with a hub repository")
    json: bool = option(False, help="one JSON object on standard output")

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
        0, help="longest sequence in tokens; 0: as many as the model has positions"
    )
    per_device_eval_batch_size: int = option(16, help="sequences at a time")
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
    """Answer prompts, those on the line or the rows of files; greedily unless told otherwise."""

    prompts: tuple[str, ...] = option(
        (), help="texts to go on from; they may stand after the model, without the option"
    )
    output_path: str | None = option(None, help="JSONL file to write; default: standard output")
    json: bool = option(False, help="JSON on standard output")
    chat: bool = option(
        False, help="--prompts are a user's messages, rendered by the chat template"
    )
    max_new_tokens: int = option(128, help="tokens of an answer at most")
    do_sample: bool = option(False, help="draw tokens instead of taking the most probable one")
    temperature: float = option(1.0, help="divides the logits, with --do_sample")
    top_p: float = option(1.0, help="draw from the most probable tokens up to this sum")
    top_k: int = option(0, help="draw from so many of the most probable tokens; 0: all")
    num_return_sequences: int = option(1, help="answers to each prompt, with --do_sample")
    seed: int = option(1234, help="of the draws")
    addons: Any = group(addon_options("generate"))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = bool(self.prompts) or bool(self.data_path)
        require(given, "prompts", "nothing", "texts, or --data_path a file of prompts")
        require_numbers(self, ">= 1", "max_new_tokens", "num_return_sequences")
        require_numbers(self, ">= 1e-06 (greedy: --no-do_sample)", "temperature")
        require_numbers(self, ">= 0", "top_k")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        if not self.do_sample and self.num_return_sequences > 1:
            raise ValueError(
                f"--num_return_sequences {self.num_return_sequences} needs --do_sample: greedy "
                "answers are all the same"
            )


# What the help of a verb ends with.
EXAMPLES: Mapping[str, str] = {
    "merge": """examples:
  dschat-lora merge output/sft              writes output/sft/model in 16 bits
  dschat-lora merge output/sft/checkpoints/step-00000500 --output_dir merged
  dschat-lora merge output/rlhf/actor --json""",
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
