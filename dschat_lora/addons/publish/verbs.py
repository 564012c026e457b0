"""The command lines of push and export."""

from functools import partial

from dschat_lora.addons.publish.config import ExportConfig, PushConfig
from dschat_lora.commands.launch import run_or_end
from dschat_lora.config.verbs import parsed_config
from dschat_lora.runtime.stage_main import late

_PUSH = """examples:
  dschat-lora push output/sft me/my-adapter --dry_run
  dschat-lora push output/sft/model me/my-model --private"""
_EXPORT = """examples:
  dschat-lora export output/sft --llama_cpp ~/llama.cpp
  dschat-lora export output/sft/model --outtype q8_0 --output_path model.gguf"""


def push(argv: list[str]) -> None:
    """Run ``dschat-lora push``."""
    config = parsed_config("push RUN REPO", PushConfig, argv, "repo", examples=_PUSH)
    late("addons.publish.sharing:push_directory")(config)


def export(argv: list[str]) -> None:
    """Run ``dschat-lora export``."""
    config = parsed_config("export RUN", ExportConfig, argv, examples=_EXPORT)
    run = partial(run_or_end, stdout=2)  # as the converter logs
    if not late("addons.publish.sharing:export_gguf")(config, run):
        raise SystemExit(1)
