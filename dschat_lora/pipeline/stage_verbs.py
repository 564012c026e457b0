"""The command lines of the stages, of ``dschat-lora pipeline`` and of ``dschat-lora demo``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from dschat_lora.config.groups import RunConfig
from dschat_lora.config.options import parse_config, typed_options
from dschat_lora.config.parser import Parser
from dschat_lora.config.verbs import EXAMPLES
from dschat_lora.perf.cards import find_card
from dschat_lora.pipeline.launch import launch_stage, split_launcher_options
from dschat_lora.pipeline.recipe import options_of_stage
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.pipeline.validation import check_stage
from dschat_lora.runtime.stage_main import late, run_main

SUMMARIES = {
    "sft": "Step 1: supervised fine-tuning of a causal language model",
    "reward": "Step 2: a reward model from pairs of answers",
    "dpo": "DPO, ORPO, SimPO or KTO: a policy without a reward model",
    "rlhf": "Step 3: PPO, RLOO or GRPO of an actor on its own responses",
}
_RUNS = {
    "sft": late("supervised.stages:run_sft"),
    "reward": late("supervised.stages:run_reward"),
    "dpo": late("supervised.stages:run_dpo"),
    "rlhf": late("rlhf.stage:run_rlhf"),
}
_PROCESSES = """

One process runs, unless --num_gpus N, --include HOST:GPU, --hostfile FILE or --master_port PORT
ask for DeepSpeed's launcher, whose options they are."""


def run_stage(
    name: str,
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
    examples: str | None = None,
) -> None:
    """The main function of a stage of a pipeline."""
    run_main(
        STAGES[name].config,
        STAGES[name].check,
        _RUNS[name],
        description=description,
        argv=argv,
        program=program,
        examples=examples,
        read_file=partial(options_of_stage, name),
    )


def stage(name: str, argv: list[str]) -> None:
    """A stage in this process, or in those that the launcher starts."""
    launcher, rest = split_launcher_options(argv)
    program = f"dschat-lora {name}"
    if launcher is None:
        about, examples = f"{SUMMARIES[name]}.", EXAMPLES[name] + _PROCESSES
        run_stage(name, description=about, argv=rest, program=program, examples=examples)
        return
    read_file = partial(options_of_stage, name)
    config: Any = parse_config(STAGES[name].config, rest, program=program, read_file=read_file)
    check_stage(name, typed_options(config), launcher.processes)
    launch_stage(name, launcher, rest)


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


def plan(argv: list[str]) -> None:
    """Run ``dschat-lora plan``."""
    parser = Parser(
        "dschat-lora plan",
        "Say what memory and time a stage takes, before anything is loaded, and which settings fit "
        "a device. The other options are the stage's own.",
        EXAMPLES["plan"],
    )
    parser.add_argument(
        "what",
        metavar="STAGE",
        help=f"{', '.join(STAGES)}, or a pipeline's YAML file or a recipe's name",
    )
    parser.add_argument(
        "--for", metavar="DEVICE", help="memory of a device, such as 24GB, or the name of a card"
    )
    parser.add_argument("--num_gpus", metavar="N", type=int, help="processes, one for each GPU")
    parser.add_argument("--json", action="store_true", help="one JSON value on standard output")
    chosen, rest = parser.parse_known_args(argv)
    values = vars(chosen)
    if values["num_gpus"] is not None and values["num_gpus"] < 1:
        raise ValueError(f"--num_gpus must be >= 1, got {values['num_gpus']}")
    card = None if values["for"] is None else find_card(values["for"])
    what, options = values["what"], None
    if what in STAGES:
        read_file = partial(options_of_stage, what)
        program = f"dschat-lora plan {what}"
        config: Any = parse_config(STAGES[what].config, rest, program=program, read_file=read_file)
        options = typed_options(config)
    elif rest:
        raise ValueError(
            f"unexpected argument {rest[0]!r}: stages with options of their own are "
            f"{', '.join(STAGES)}, and {what} is taken for a pipeline's file"
        )
    show = late("pipeline.plan_report:show_plans")
    if not show(what, options, card=card, processes=values["num_gpus"], as_json=values["json"]):
        raise SystemExit(1)


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


def demo(argv: list[str]) -> None:
    """Run ``dschat-lora demo``."""
    parser = Parser("dschat-lora demo", "Train on the bundled model and data, show what changed.")
    parser.add_argument(
        "--output_dir", metavar="DIR", help="default: the first free of output/demo, -2, -3, ..."
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=1234, help="of all stages (default: 1234)"
    )
    chosen = parser.values(argv, ["output_dir", "seed"])
    RunConfig(seed=chosen["seed"])  # refuses one that no stage takes, before anything is written
    late("pipeline.demo:run_demo")(**chosen)
