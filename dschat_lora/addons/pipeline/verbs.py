"""The command line of ``dschat-lora pipeline``."""

from dschat_lora.config.parser import Parser
from dschat_lora.runtime.stage_main import late


def pipeline(argv: list[str]) -> None:
    """Run ``dschat-lora pipeline``."""
    parser = Parser(
        "dschat-lora pipeline",
        "Run the stages of a YAML file one after another; those that are finished are "
        "skipped, one that was stopped goes on.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="YAML file of the stages and their options, or a recipe's name"
    )
    parser.add_argument("--output_dir", metavar="DIR", help="instead of the file's output_dir")
    parser.add_argument("--num_gpus", metavar="N", type=int, help="processes, one for each GPU")
    parser.add_argument(
        "--dry_run", action="store_true", help="check all stages, say what would run, and stop"
    )
    parser.add_argument(
        "--from",
        dest="redo_from",
        metavar="STAGE",
        help="do this stage and all later ones again, over what they left",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="STAGE.OPTION=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="options instead of the file's",
    )
    chosen = parser.values(argv, ["output_dir", "num_gpus", "dry_run", "from", "set"])
    late("addons.pipeline.run:run_pipeline")(**chosen)
