"""The command lines of ``dschat-lora inspect`` and ``dschat-lora accept``."""

from dschat_lora.addons.inspect.describe import InspectConfig, inspect_directory
from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.config.parser import Parser
from dschat_lora.config.verbs import parsed_config
from dschat_lora.report.terminal import log_once

_INSPECT = """examples:
  dschat-lora inspect output/sft
  dschat-lora inspect output/sft/adapter --json"""


def inspect(argv: list[str]) -> None:
    """Run ``dschat-lora inspect``."""
    config = parsed_config("inspect DIRECTORY", InspectConfig, argv, examples=_INSPECT)
    if not inspect_directory(config):
        raise SystemExit(1)


def accept(argv: list[str]) -> None:
    """Run ``dschat-lora accept``."""
    parser = Parser("dschat-lora accept", "Accept an adapter whose files were changed on purpose.")
    parser.add_argument("adapter", help="adapter directory whose manifest is rewritten")
    directory = parser.values(argv, [])["adapter"]
    accept_adapter(directory)
    log_once(f"{directory}: the files now match the manifest")
