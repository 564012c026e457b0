"""The command lines of ``dschat-lora pipeline`` and ``dschat-lora recipes``."""

import re
from itertools import takewhile
from pathlib import Path

from dschat_lora.config import bundled
from dschat_lora.config.parser import Parser
from dschat_lora.report.terminal import log_once, print_json
from dschat_lora.runtime.stage_main import late


def pipeline(argv: list[str]) -> None:
    """Run ``dschat-lora pipeline``."""
    parser = Parser(
        "dschat-lora pipeline",
        "Run the stages of a YAML file one after another; finished ones are skipped, and a "
        "stopped one is resumed.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help="YAML file with the stages and their options, or the name of a recipe",
    )
    parser.add_argument("--output_dir", metavar="DIR", help="overrides output_dir of the file")
    parser.add_argument(
        "--num_gpus", metavar="N", type=int, help="number of processes, one per GPU"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="check all stages, print what would run, and exit"
    )
    parser.add_argument(
        "--from",
        dest="redo_from",
        metavar="STAGE",
        help="run this stage and all later ones again, overwriting their output",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="STAGE.OPTION=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="override options of the file",
    )
    chosen = parser.values(argv, ["output_dir", "num_gpus", "dry_run", "from", "set"])
    late("addons.pipeline.run:run_pipeline")(**chosen)


def recipes(argv: list[str]) -> None:
    """Run ``dschat-lora recipes``."""
    parser = Parser("dschat-lora recipes", "List the recipes that come with the package.")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON list to standard output"
    )
    paths = bundled.recipes()
    if parser.values(argv, ["json"])["json"]:
        print_json([_facts(name, path) for name, path in paths.items()])
        return
    width = max(map(len, paths))
    for name, path in paths.items():
        log_once(f"{name:<{width}}  {_facts(name, path)['summary']}")
    log_once(
        "\n--config NAME takes a stage's options from one; dschat-lora pipeline NAME runs all "
        "stages of one that has no folder"
    )


def _facts(name: str, path: Path) -> dict[str, str]:
    """Of a recipe the verb that takes it, and the first sentence of the comment it begins with."""
    kind = name.rpartition("/")[0] or "pipeline"
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#") and line != "#", lines)
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    return {
        "name": name,
        "kind": kind,
        "summary": re.split(r"[.:](?:\s|$)", text, maxsplit=1)[0],
        "command": f"dschat-lora {kind} {'' if kind == 'pipeline' else '--config '}{name}",
        "path": str(path),
    }
