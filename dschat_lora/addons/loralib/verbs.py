"""The command line of extract."""

from dschat_lora.config.parser import Parser
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.stage_main import late


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
    late("addons.loralib.extract:extract")(**chosen, say=log_once)
