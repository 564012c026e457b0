"""The command lines of ``dschat-lora pipeline`` and ``dschat-lora doctor``."""

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
    late("pipeline.run:run_pipeline")(**chosen)


def doctor(argv: list[str]) -> None:
    """Run ``dschat-lora doctor``."""
    parser = Parser(
        "dschat-lora doctor",
        "Say whether this machine can train, and what to do where it cannot: versions, devices, "
        "compiler, disk, network, and two steps of the bundled model on each device.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--no_training", action="store_true", help="leave the training step out")
    parser.add_argument(
        "--first_hour",
        action="store_true",
        help="on a GPU, in 40 minutes at most: compare what it computes with the CPU, measure "
        "speed and memory, and write output/first-hour/first_hour.html for a bug report",
    )
    chosen = parser.values(argv, ["json", "no_training", "first_hour"])
    if chosen["first_hour"]:
        for name in ("json", "no_training"):
            if chosen[name]:
                raise ValueError(f"--first_hour has no --{name}: leave one of them out")
        late("pipeline.first_hour:first_hour")()
        return
    diagnose = late("pipeline.doctor:diagnose")
    if not diagnose(as_json=chosen["json"], trains=not chosen["no_training"]):
        raise SystemExit(1)
