"""The command lines of the verbs that look at data, models and runs, or use them."""

from typing import TYPE_CHECKING, TypeVar

from dschat_lora.config.addons import groups_of
from dschat_lora.config.options import parse_config
from dschat_lora.config.verbs import (
    EXAMPLES,
    GenerateConfig,
    MergeConfig,
)
from dschat_lora.runtime.stage_main import late
from dschat_lora.runtime.validation import check_generate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


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
