"""The command line of extract."""

from dschat_lora.config.parser import Parser
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.stage_main import late


def extract(argv: list[str]) -> None:
    """Run ``dschat-lora extract``."""
    parser = Parser(
        "dschat-lora extract",
        "Extract the LoRA weights and the head of a full checkpoint as an adapter for PEFT.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="directory (the Trainer's checkpoint-N) or file with model or LoRA weights",
    )
    parser.add_argument(
        "--base",
        metavar="MODEL",
        required=True,
        help="hub name or directory of the unmodified base model",
    )
    parser.add_argument(
        "--lora_alpha",
        metavar="X",
        type=float,
        help="lora_alpha of the training, which checkpoints do not record",
    )
    parser.add_argument(
        "--enable_lora",
        metavar="PART",
        nargs="*",
        action="once",
        help="parts (q, k, v) of packed projections that were trained",
    )
    parser.add_argument("--output_dir", metavar="DIR", help="default: CHECKPOINT/adapter")
    chosen = parser.values(argv, ["base", "lora_alpha", "enable_lora", "output_dir"])
    chosen["enable_lora"] = tuple(chosen["enable_lora"] or ())
    late("addons.loralib.extract:extract")(**chosen, say=log_once)
