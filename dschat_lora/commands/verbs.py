"""The command lines of the verbs that look at data, models and runs, or use them."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.config import bundled
from dschat_lora.config.addons import groups_of
from dschat_lora.config.options import parse_config
from dschat_lora.config.parser import Parser
from dschat_lora.config.stages import AuditConfig
from dschat_lora.config.verbs import (
    EXAMPLES,
    GenerateConfig,
    InspectConfig,
    MergeConfig,
)
from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.rollouts import show_rollouts
from dschat_lora.report.run_data import read_runs
from dschat_lora.report.terminal import log_once, to_json
from dschat_lora.runtime import describe
from dschat_lora.runtime.directory import check_file_can_be_made
from dschat_lora.runtime.stage_main import late
from dschat_lora.runtime.validation import check_audit, check_generate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


def recipes(argv: list[str]) -> None:
    """Run ``dschat-lora recipes``."""
    parser = Parser("dschat-lora recipes", "List the recipes that come with the package.")
    parser.add_argument("--json", action="store_true", help="one JSON list on standard output")
    found = bundled.recipes()
    if parser.values(argv, ["json"])["json"]:
        fields = ("name", "kind", "summary", "command")
        rows = [{f: getattr(each, f) for f in fields} | {"path": str(each.path)} for each in found]
        log_once(to_json(rows))
        return
    width = max(len(each.name) for each in found)
    for each in found:
        log_once(f"{each.name:<{width}}  {each.summary}")
    log_once(
        "\n--config NAME takes a stage's options from one; dschat-lora pipeline NAME runs all "
        "stages of one that has no folder"
    )


def report(argv: list[str]) -> None:
    """Run ``dschat-lora report``."""
    parser = Parser(
        "dschat-lora report",
        "Write one page about runs: verdict, curves, samples, cost, settings. Runs of one stage "
        "share their charts.",
        "examples:\n  dschat-lora report output/sft output/reward output/rlhf",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output directory of a run")
    parser.add_argument(
        "--output_path", metavar="FILE", help="default: report.html in the first directory"
    )
    chosen = parser.values(argv, ["output_path"])
    homes = [Path(run).expanduser() for run in chosen["runs"]]
    for home in homes:
        if not (home / "run.json").is_file():
            raise ValueError(f"{home} holds no run.json: it is not the output directory of a run")
    path = Path(chosen["output_path"] or homes[0] / "report.html").expanduser()
    check_file_can_be_made(str(path), "output_path")
    title = ", ".join(home.resolve().name for home in homes)
    write_report(path, render_report(title, read_runs(homes), {}))
    log_once(f"report: {path}")


def rollouts(argv: list[str]) -> None:
    """Run ``dschat-lora rollouts``."""
    parser = Parser(
        "dschat-lora rollouts",
        "Look through the responses that a run of step 3 kept: by default the best and the worst.",
        "examples:\n  dschat-lora rollouts output/rlhf --changed 3",
    )
    parser.add_argument("run", metavar="OUT", help="output directory of the run")
    numbers = {
        "best": "show N responses of the highest reward",
        "worst": "show N responses of the lowest reward",
        "changed": "show N prompts whose mean reward changed most, by the best response before "
        "and after",
        "failed": "show the last N episodes of an agent that failed, and why",
    }
    for name, text in numbers.items():
        parser.add_argument(f"--{name}", metavar="N", type=int, default=0, help=text)
    parser.add_argument("--contains", metavar="TEXT", help="only where prompt or response has TEXT")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="responses to prompts with TEXT, over time"
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, default=20, help="most of these two (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.values(argv, [*numbers, "contains", "prompt", "limit", "json"])
    for name in (*numbers, "limit"):
        if chosen[name] < 0:
            raise ValueError(f"--{name} must be >= 0, got {chosen[name]}")
    if not any(chosen[name] for name in (*numbers, "contains", "prompt")):
        chosen |= {"best": 3, "worst": 3}
    show_rollouts(Path(chosen.pop("run")), **chosen)


def inspect(argv: list[str]) -> None:
    """Run ``dschat-lora inspect``."""
    if not describe.inspect_directory(parsed_config("inspect DIRECTORY", InspectConfig, argv)):
        raise SystemExit(1)


def accept(argv: list[str]) -> None:
    """Run ``dschat-lora accept``."""
    parser = Parser("dschat-lora accept", "Vouch for an adapter that was changed on purpose.")
    parser.add_argument("adapter", help="its directory, whose manifest is written anew")
    directory = parser.values(argv, [])["adapter"]
    accept_adapter(directory)
    log_once(f"{directory}: its files are the ones its manifest says")


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


def audit(argv: list[str]) -> None:
    """Run ``dschat-lora audit``."""
    config = parse_config(
        AuditConfig,
        argv,
        description=AuditConfig.__doc__,
        program="dschat-lora audit DATA",
        positionals=("data_path",),
    )
    if not late("runtime.data_audit:show_audit")(check_audit(config)):
        raise SystemExit(1)


def merge(argv: list[str]) -> None:
    """Run ``dschat-lora merge``."""
    late("runtime.merge:show_merge")(parsed_config("merge RUN", MergeConfig, argv))


def generate(argv: list[str]) -> None:
    """Run ``dschat-lora generate``."""
    config = parsed_config("generate RUN [PROMPT ...]", GenerateConfig, argv, "prompts")
    check_generate(config)
    if not any(own.generate(config) for own in groups_of(config, "generate")):
        late("supervised.generate:generate_answers")(config)
