"""The command lines of the verbs that look at data, models and runs, or use them."""

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dschat_lora.commands.launch import run_or_end
from dschat_lora.config.addons import groups_of
from dschat_lora.config.options import parse_config
from dschat_lora.config.parser import Parser
from dschat_lora.config.verbs import (
    EXAMPLES,
    ExportConfig,
    GenerateConfig,
    MergeConfig,
    PushConfig,
)
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime import sharing
from dschat_lora.runtime.stage_main import late
from dschat_lora.runtime.validation import check_generate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


def push(argv: list[str]) -> None:
    """Run ``dschat-lora push``."""
    config = parsed_config("push RUN REPO", PushConfig, argv, "repo")
    late("runtime.sharing:push_directory")(config)


def export(argv: list[str]) -> None:
    """Run ``dschat-lora export``."""
    config = parsed_config("export RUN", ExportConfig, argv)
    if not sharing.export_gguf(config, partial(run_or_end, stdout=2)):  # as the converter logs
        raise SystemExit(1)


def extract(argv: list[str]) -> None:
    """Run ``dschat-lora extract``."""
    parser = Parser(
        "dschat-lora extract",
        "Write the LoRA factors and the head that a full checkpoint holds as an "
        "adapter that PEFT loads.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="directory (the Trainer's checkpoint-N), or file of a model's or of LoRA weights",
    )
    parser.add_argument(
        "--base", metavar="MODEL", required=True, help="hub name or directory of the clean base"
    )
    parser.add_argument(
        "--lora_alpha", metavar="X", type=float, help="of the training; no checkpoint says it"
    )
    parser.add_argument(
        "--enable_lora", metavar="PART", nargs="*", action="once", help="q, k, v of packed layers"
    )
    parser.add_argument("--output_dir", metavar="DIR", help="default: CHECKPOINT/adapter")
    chosen = parser.values(argv, ["base", "lora_alpha", "enable_lora", "output_dir"])
    chosen["enable_lora"] = tuple(chosen["enable_lora"] or ())
    late("checkpoint.extract:extract")(**chosen, say=log_once)


def parsed_config(
    usage: str,
    config_class: type[ConfigT],
    argv: list[str],
    *more: str,
    examples: str | None = None,
) -> ConfigT:
    """The options of a verb that reads a directory, whose name may stand first."""
    first = next(iter(config_class.__dataclass_fields__))
    return parse_config(
        config_class,
        argv,
        description=config_class.__doc__,
        program=f"dschat-lora {usage}",
        examples=examples or EXAMPLES[usage.partition(" ")[0]],
        positionals=(first, *more),
    )


def merge(argv: list[str]) -> None:
    """Run ``dschat-lora merge``."""
    late("runtime.merge:show_merge")(parsed_config("merge RUN", MergeConfig, argv))


def generate(argv: list[str]) -> None:
    """Run ``dschat-lora generate``."""
    config = parsed_config("generate RUN [PROMPT ...]", GenerateConfig, argv, "prompts")
    check_generate(config)
    if not any(own.generate(config) for own in groups_of(config, "generate")):
        late("supervised.generate:generate_answers")(config)
