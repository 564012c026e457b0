"""The command lines of the verbs on pipelines, this machine, and what runs left."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.commands.launch import run_or_end
from dschat_lora.config.bundled import recipes
from dschat_lora.config.options import parse_config
from dschat_lora.config.parser import Parser
from dschat_lora.config.stages import ScoreConfig
from dschat_lora.config.verbs import (
    EXAMPLES,
    ExportConfig,
    InspectConfig,
    ModelsConfig,
    PushConfig,
)
from dschat_lora.models.families import COLUMNS, read_families, short
from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.rollouts import show_rollouts
from dschat_lora.report.run_data import read_runs
from dschat_lora.report.terminal import log_once, table, to_json, wrapped
from dschat_lora.runtime import describe, sharing
from dschat_lora.runtime.directory import check_file_can_be_made
from dschat_lora.runtime.stage_main import ended_in_one_line, late
from dschat_lora.runtime.validation import check_reading

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


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
        late("addons.planning.first_hour:first_hour")()
        return
    diagnose = late("addons.planning.doctor:diagnose")
    if not diagnose(as_json=chosen["json"], trains=not chosen["no_training"]):
        raise SystemExit(1)


def list_recipes(argv: list[str]) -> None:
    """Run ``dschat-lora recipes``."""
    parser = Parser("dschat-lora recipes", "List the recipes that come with the package.")
    parser.add_argument("--json", action="store_true", help="one JSON list on standard output")
    found = recipes()
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


def models(argv: list[str]) -> None:
    """Run ``dschat-lora models``."""
    config = parsed_config("models [MODEL]", ModelsConfig, argv)
    if config.model_name_or_path is None:
        _show_families(as_json=config.json)
    elif not late("addons.planning.known_models:show_model")(config):
        raise SystemExit(1)


def _show_families(*, as_json: bool) -> None:
    """Print the table of types, the reasons of what is missing, and what the columns say."""
    found = read_families()
    if as_json:
        log_once(to_json(asdict(found)))
        return
    log_once(f"types of models with transformers {found.transformers}, found by trying each\n")
    for line in table(["type", *map(short, COLUMNS)], found.rows()):
        log_once(line)
    for column, reasons in found.why_not().items():
        log_once(f"\n{short(column)}: {COLUMNS[column]}; not for")
        for reason, kinds in reasons.items():
            log_once(wrapped(f"  {', '.join(kinds)}: {reason}"))
    log_once(
        "\n- nothing to try; ? not tried. Other types are tried by the probe that starts a run."
    )


def inspect(argv: list[str]) -> None:
    """Run ``dschat-lora inspect``."""
    if not describe.inspect_directory(parsed_config("inspect DIRECTORY", InspectConfig, argv)):
        raise SystemExit(1)


def score(argv: list[str]) -> None:
    """Run ``dschat-lora score``."""
    config = parsed_config("score RUN [DATA ...]", ScoreConfig, argv, "data_path")
    check_reading(config, ("SEQ_CLS",))
    with ended_in_one_line(stopped="stopped; --output_path was not written"):
        late("addons.evaluation.score:score_files")(config)


def push(argv: list[str]) -> None:
    """Run ``dschat-lora push``."""
    config = parsed_config("push RUN REPO", PushConfig, argv, "repo")
    late("runtime.sharing:push_directory")(config)


def export(argv: list[str]) -> None:
    """Run ``dschat-lora export``."""
    config = parsed_config("export RUN", ExportConfig, argv)
    if not sharing.export_gguf(config, partial(run_or_end, stdout=2)):  # as the converter logs
        raise SystemExit(1)


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
    late("checkpoint.extract:extract")(**chosen, say=log_once)


def accept(argv: list[str]) -> None:
    """Run ``dschat-lora accept``."""
    parser = Parser("dschat-lora accept", "Vouch for an adapter that was changed on purpose.")
    parser.add_argument("adapter", help="its directory, whose manifest is written anew")
    directory = parser.values(argv, [])["adapter"]
    accept_adapter(directory)
    log_once(f"{directory}: its files are the ones its manifest says")


def parsed_config(usage: str, config_class: type[ConfigT], argv: list[str], *more: str) -> ConfigT:
    """The options of a verb that reads a directory, whose name may stand first."""
    verb = usage.partition(" ")[0]
    first = next(iter(config_class.__dataclass_fields__))
    return parse_config(
        config_class,
        argv,
        description=config_class.__doc__,
        program=f"dschat-lora {usage}",
        examples=EXAMPLES[verb],
        positionals=(first, *more),
    )
