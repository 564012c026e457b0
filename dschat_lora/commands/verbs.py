"""The command lines of the verbs that look at data, models and runs, or use them."""

from dschat_lora.config.addons import groups_of
from dschat_lora.config.verbs import EXAMPLES, GenerateConfig, MergeConfig, parsed_config
from dschat_lora.runtime.stage_main import late
from dschat_lora.runtime.validation import check_generate


def merge(argv: list[str]) -> None:
    """Run ``dschat-lora merge``."""
    config = parsed_config("merge RUN", MergeConfig, argv, examples=EXAMPLES["merge"])
    late("runtime.merge:show_merge")(config)


def generate(argv: list[str]) -> None:
    """Run ``dschat-lora generate``."""
    usage, examples = "generate RUN [PROMPT ...]", EXAMPLES["generate"]
    config = parsed_config(usage, GenerateConfig, argv, "prompts", examples=examples)
    check_generate(config)
    if not any(own.generate(config) for own in groups_of(config, "generate")):
        late("supervised.generate:generate_answers")(config)
