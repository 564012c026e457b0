"""The command lines of ``dschat-lora plan``, ``tune``, ``doctor`` and ``models``."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dschat_lora.addons.planning.cards import find_card
from dschat_lora.addons.planning.config import ModelsConfig, TuneConfig
from dschat_lora.addons.planning.families import COLUMNS, read_families, short
from dschat_lora.addons.planning.published import MODEL_OPTIONS, published_name
from dschat_lora.commands.launch import split_launcher_options
from dschat_lora.commands.stages import STAGES, options_of_file, with_verb_defaults
from dschat_lora.commands.train import rank_of
from dschat_lora.config.bundled import find_recipe
from dschat_lora.config.options import (
    build_config,
    option_fields,
    option_names,
    parse_config,
    typed_options,
)
from dschat_lora.config.parser import OTHER, Parser
from dschat_lora.config.verbs import parsed_config
from dschat_lora.report.terminal import log_once, print_json, table, wrapped
from dschat_lora.runtime.checks import require_packages
from dschat_lora.runtime.stage_main import late

PLAN_EXAMPLES = """examples:
  dschat-lora plan Qwen/Qwen3-0.6B --for 24GB
  dschat-lora plan rlhf --actor_model_name_or_path Qwen3-8B \\
    --critic_model_name_or_path Qwen3-8B --for H100
  dschat-lora plan llama-2-7b --for 48GB    every stage of a recipe
  dschat-lora plan dpo --model_name_or_path my/config.json --lora_dim 8 --json"""
TUNE_EXAMPLES = """examples:
  dschat-lora tune sft --data_path mine.jsonl --max_steps 200
  dschat-lora tune dpo --model_name_or_path output/sft --ranks 8 64 --jobs 2
  dschat-lora tune sft --rates 1e-4 3e-4 1e-3 --seeds 3 --output_dir search"""
MODELS_EXAMPLES = """examples:
  dschat-lora models
  dschat-lora models Qwen/Qwen3-30B-A3B
  dschat-lora models my/model --json"""


def plan(argv: list[str]) -> None:
    """Run ``dschat-lora plan``."""
    parser = Parser(
        "dschat-lora plan [STAGE] [MODEL]",
        "Estimate the memory and time of a stage without loading anything, and find settings that "
        f"fit a device. All other options are the stage's. STAGE is one of {', '.join(STAGES)} "
        "(default: sft), or a pipeline's YAML file or a recipe's name.",
        PLAN_EXAMPLES,
    )
    parser.add_argument(
        "--for", metavar="DEVICE", help="memory per device, such as 24GB, or the name of a GPU"
    )
    parser.add_argument(
        "--num_gpus", metavar="N", type=int, help="number of processes, one per GPU"
    )
    parser.add_argument("--json", action="store_true", help="print JSON to standard output")
    chosen, rest = parser.parse_known_args(argv)
    values = vars(chosen)
    if values["num_gpus"] is not None and values["num_gpus"] < 1:
        raise ValueError(f"--num_gpus must be >= 1, got {values['num_gpus']}")
    card = None if values["for"] is None else find_card(values["for"])
    what, options = "sft", None
    if rest and not rest[0].startswith("-") and not names_model(rest[0]):
        what, *rest = rest
    if what in STAGES:
        model = next(name for name in option_names(STAGES[what].config) if name in MODEL_OPTIONS)
        options = _typed("plan", what, rest, positionals=(model,))
    elif rest:
        raise ValueError(
            f"unexpected argument {rest[0]!r}: stages with their own options are "
            f"{', '.join(STAGES)}, and {what} is taken for a pipeline file"
        )
    show = late("addons.planning.plan_report:show_plans")
    if not show(what, options, card=card, processes=values["num_gpus"], as_json=values["json"]):
        raise SystemExit(1)


def names_model(word: str) -> bool:
    """Whether a word is a model's name or path, and no stage, pipeline's file or recipe.

    Raises:
        ValueError: if it is none of these.
    """
    path = Path(word).expanduser()
    if word in STAGES or path.suffix in (".yaml", ".yml"):
        return False
    if path.exists():
        return path.is_dir() or path.name == "config.json" or path.suffix == ".gguf"
    try:
        find_recipe(word, label=word)
    except ValueError as error:
        if "/" in word or published_name(word):
            return True
        raise ValueError(
            f"{error}; a stage is one of {', '.join(STAGES)}, and a model is named as owner/name, "
            "or by its directory"
        ) from error
    return False


def tune(argv: list[str]) -> None:
    """Run ``dschat-lora tune``."""
    parser = Parser("dschat-lora tune", TuneConfig.__doc__, TUNE_EXAMPLES)
    parser.add_argument("stage", metavar="STAGE", help=", ".join(STAGES))
    for name, option in option_fields(TuneConfig).items():
        parser.add_option(OTHER, [name], *option)
    chosen, rest = parser.parse_known_args(argv)
    values = vars(chosen)
    if (stage := values.pop("stage")) not in STAGES:
        raise ValueError(f"STAGE must be one of {', '.join(STAGES)}, got {stage!r}")
    launcher, rest = split_launcher_options(rest)
    options = _typed("tune", stage, rest)
    require_packages("dschat-lora tune", "optuna", extra="planning")
    search = build_config(TuneConfig, values)
    late("addons.planning.tune:run_tune")(search, stage, options, launcher)


def _typed(
    verb: str, stage: str, argv: list[str], positionals: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A stage's options as typed, with the defaults of its verb."""
    config = parse_config(
        STAGES[stage].config,
        argv,
        program=f"dschat-lora {verb} {stage}",
        positionals=positionals,
        read_file=partial(options_of_file, stage),
    )
    return typed_options(with_verb_defaults(config, rank=rank_of(argv)))


def doctor(argv: list[str]) -> None:
    """Run ``dschat-lora doctor``."""
    parser = Parser(
        "dschat-lora doctor",
        "Check whether this machine can train, and suggest fixes: versions, devices, compiler, "
        "disk, network, and two training steps of the bundled model on each device.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object to standard output"
    )
    parser.add_argument("--no_training", action="store_true", help="skip the training step")
    chosen = parser.values(argv, ["json", "no_training"])
    diagnose = late("addons.planning.doctor:diagnose")
    if not diagnose(as_json=chosen["json"], trains=not chosen["no_training"]):
        raise SystemExit(1)


def models(argv: list[str]) -> None:
    """Run ``dschat-lora models``."""
    config = parsed_config("models [MODEL]", ModelsConfig, argv, examples=MODELS_EXAMPLES)
    if config.model_name_or_path is None:
        _show_families(as_json=config.json)
    elif not late("addons.planning.known_models:show_model")(config):
        raise SystemExit(1)


def _show_families(*, as_json: bool) -> None:
    """Print the table of types, the reasons of what is missing, and what the columns say."""
    families = read_families()
    if as_json:
        print_json(asdict(families))
        return
    log_once(f"model types, tested with transformers {families.transformers}\n")
    for line in table(["type", *map(short, COLUMNS)], families.rows()):
        log_once(line)
    for column, reasons in families.why_not().items():
        log_once(f"\n{short(column)}: {COLUMNS[column]}; not for")
        for reason, kinds in reasons.items():
            log_once(wrapped(f"  {', '.join(kinds)}: {reason}"))
    log_once("\n- not applicable; ? not tested. Other types are checked at the start of a run.")
