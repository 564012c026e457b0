"""The command lines of what trains and of what the Python API does.

Those are the stages, the papers' experiments, the verbs of the API's names, and the demo.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.validation import check_glue, fix_environment
from dschat_lora.addons.nlg.config import (
    DecodeConfig,
    EvaluateConfig,
    FormatConfig,
    NlgConfig,
)
from dschat_lora.addons.nlg.predictions import run_format, scorer_arguments
from dschat_lora.addons.nlg.validation import (
    check_decode,
    check_evaluate,
    check_format,
    check_training,
)
from dschat_lora.addons.pipeline.recipe import options_of_stage
from dschat_lora.api import stages, verbs
from dschat_lora.commands.launch import (
    launch_command,
    launch_stage,
    launcher_command,
    run_or_end,
    split_launcher_options,
)
from dschat_lora.commands.stages import (
    MODEL_OPTIONS,
    RANK,
    STAGES,
    check_as_verb,
    check_stage,
    names_model,
    planned_card,
    with_verb_defaults,
)
from dschat_lora.commands.verbs import parsed_config
from dschat_lora.config.groups import RunConfig
from dschat_lora.config.options import (
    build_config,
    chosen_verb,
    flatten,
    option_fields,
    option_names,
    parse_config,
    typed_options,
)
from dschat_lora.config.parser import OTHER, Parser
from dschat_lora.config.stages import AuditConfig
from dschat_lora.config.verbs import EXAMPLES, EvalConfig, GenerateConfig, MergeConfig, TuneConfig
from dschat_lora.runtime.checks import require_packages
from dschat_lora.runtime.seeds import run_seeds
from dschat_lora.runtime.stage_main import exits, late, run_main
from dschat_lora.runtime.validation import check_audit, check_reading

SUMMARIES = {
    "sft": "Step 1: supervised fine-tuning of a causal language model",
    "reward": "Step 2: a reward model from pairs of answers",
    "dpo": "DPO, ORPO, SimPO or KTO: a policy without a reward model",
    "rlhf": "Step 3: PPO, RLOO or GRPO of an actor on its own responses",
    "distill": "On-policy distillation: a student's own responses, scored by a teacher",
}
EXPERIMENTS = {
    "nlg": "GPT-2 puts data into words: train, decode, format or evaluate",
    "glue": "GLUE with RoBERTa or DeBERTa-v2",
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
    check: Callable[[Any], Any] | None = None,
) -> None:
    """The main function of a stage of a pipeline, by default with DeepSpeed-Chat's defaults."""
    run_main(
        STAGES[name].config,
        check or STAGES[name].check,
        exits(stages.PROGRAMS[name]),
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
        run_stage(
            name,
            description=about,
            argv=rest,
            program=program,
            examples=examples,
            check=partial(check_as_verb, stage=name, rank=_rank(rest)),
        )
        return
    read_file = partial(options_of_stage, name)
    config: Any = parse_config(STAGES[name].config, rest, program=program, read_file=read_file)
    check_stage(name, typed_options(config), launcher.processes, rank=_rank(rest))
    launch_stage(name, launcher, rest)


def _rank(argv: Sequence[str]) -> int:
    """Rank of adapters where no option says one: 0 beside a file, which says what trains."""
    return 0 if any(word.partition("=")[0] == "--config" for word in argv) else RANK


def run_nlg(
    argv: Sequence[str],
    *,
    description: str | None = None,
    program: str | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """The main function of GPT-2 on tables of data: train, decode, format or evaluate.

    ``beam`` is another name of decode; decode with ``--sample_file``, as the original's
    ``gpt2_decode.py`` has it, is format. ``command`` starts each run of ``--seeds``.
    """
    verb, argv = chosen_verb(argv, ("train", "decode", "beam", "format", "evaluate"))
    if verb == "decode" and any(word.startswith("--sample_file") for word in argv):
        verb = "format"
    if verb == "evaluate":
        argv = scorer_arguments(argv)
    run = partial(run_main, description=description, argv=argv, program=program)
    if verb == "train":
        main_function = exits(late("addons.nlg.train:run_training"))
        run(NlgConfig, check_training, _once_or_by_seeds("nlg", main_function, command))
    elif verb in ("decode", "beam"):
        run(DecodeConfig, check_decode, late("addons.nlg.decode:run_decode"))
    elif verb == "format":
        run(FormatConfig, check_format, run_format)
    else:
        run(EvaluateConfig, check_evaluate, late("addons.nlg.evaluate:run_evaluate"))


def run_glue(
    argv: Sequence[str],
    *,
    description: str | None = None,
    program: str | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """The main function of GLUE; ``command`` starts each run of ``--seeds``."""
    fix_environment()

    def run_once(config: GlueConfig) -> None:
        # A dry run does without the seconds that the imports of training take.
        if config.dry_run:
            late("addons.glue.validation:describe_plan")(config)
        else:
            late("addons.glue.train:run_glue")(config)

    run = _once_or_by_seeds("glue", exits(run_once), command)
    run_main(GlueConfig, check_glue, run, description=description, argv=argv, program=program)


def _once_or_by_seeds(
    name: str, run_once: Callable[..., None], command: Sequence[str] | None
) -> Callable[[Any], None]:
    """What a checked config is given to: one run, or as many as ``--seeds`` says."""
    prefix = command or (sys.executable, "-m", "dschat_lora", name)

    def run(config: GlueConfig | NlgConfig) -> None:
        if config.seeds > 1 and not flatten(config)["dry_run"]:
            run_seeds(config, name=name, prefix=prefix, run=run_or_end)
        else:
            run_once(config)

    return run


def experiment(name: str, argv: list[str]) -> None:
    """The experiment of a paper in this process, or in those that the launcher starts.

    Of several seeds each run has processes of the launcher.
    """
    launcher, rest = split_launcher_options(argv)
    command = None
    if launcher is not None:
        command = launch_command(name, launcher, (), program=launcher_command())
        if not any(word.split("=")[0] == "--seeds" for word in rest):
            launch_stage(name, launcher, rest)
    texts = {"description": f"{EXPERIMENTS[name]}.", "program": f"dschat-lora {name}"}
    {"nlg": run_nlg, "glue": run_glue}[name](rest, **texts, command=command)


def launched(
    name: str,
    check: Callable[[list[str]], object],
    run: Callable[[list[str]], None],
    argv: list[str],
) -> None:
    """A verb in this process or, with options that hold, in those that the launcher starts."""
    launcher, rest = split_launcher_options(argv)
    if launcher is None:
        run(rest)
    else:
        check(rest)
        launch_stage(name, launcher, rest)


def plan(argv: list[str]) -> None:
    """Run ``dschat-lora plan``."""
    parser = Parser(
        "dschat-lora plan [STAGE] [MODEL]",
        "Say what memory and time a stage takes, before anything is loaded, and which settings fit "
        "a device. The other options are the stage's own. "
        f"STAGE is one of {', '.join(STAGES)} (default: sft), or a pipeline's YAML file or a "
        "recipe's name.",
        EXAMPLES["plan"],
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
    card = planned_card(values["for"])
    what, options = "sft", None
    if rest and not rest[0].startswith("-") and not names_model(rest[0]):
        what, *rest = rest
    if what in STAGES:
        read_file, stage = partial(options_of_stage, what), STAGES[what].config
        model = next(name for name in option_names(stage) if name in MODEL_OPTIONS)
        program = f"dschat-lora plan {what}"
        config: Any = parse_config(
            stage, rest, program=program, positionals=(model,), read_file=read_file
        )
        options = typed_options(with_verb_defaults(config, rank=_rank(rest)))
    elif rest:
        raise ValueError(
            f"unexpected argument {rest[0]!r}: stages with options of their own are "
            f"{', '.join(STAGES)}, and {what} is taken for a pipeline's file"
        )
    show = late("addons.planning.plan_report:show_plans")
    if not show(what, options, card=card, processes=values["num_gpus"], as_json=values["json"]):
        raise SystemExit(1)


def tune(argv: list[str]) -> None:
    """Run ``dschat-lora tune``."""
    parser = Parser("dschat-lora tune", TuneConfig.__doc__, EXAMPLES["tune"])
    parser.add_argument("stage", metavar="STAGE", help=", ".join(STAGES))
    for name, option in option_fields(TuneConfig):
        parser.add_option(OTHER, [name], *option)
    chosen, rest = parser.parse_known_args(argv)
    values = vars(chosen)
    if (stage := values.pop("stage")) not in STAGES:
        raise ValueError(f"STAGE must be one of {', '.join(STAGES)}, got {stage!r}")
    launcher, rest = split_launcher_options(rest)
    read_file, program = partial(options_of_stage, stage), f"dschat-lora tune {stage}"
    config: Any = parse_config(STAGES[stage].config, rest, program=program, read_file=read_file)
    require_packages("dschat-lora tune", "optuna", extra="tune")
    search = build_config(TuneConfig, values)
    options = typed_options(with_verb_defaults(config, rank=_rank(rest)))
    late("addons.planning.tune:run_tune")(search, stage, options, launcher)


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
    make_judge = verbs.judge_maker("reward_function", config.reward_function)
    check_reading(config, ("CAUSAL_LM",))
    if config.keep is None:
        late("supervised.generate:generate_answers")(config)
    else:
        late("addons.evaluation.best_of_n:write_kept_answers")(config, make_judge)


def evaluate(argv: list[str]) -> None:
    """Run ``dschat-lora eval``."""
    config = parsed_config("eval RUN [DATA ...]", EvalConfig, argv, "data_path")
    scores, judge = verbs.eval_parts(config)
    found = late("addons.evaluation.measure:evaluate_model")(
        config, scores=scores, make_judge=judge
    )
    late("addons.evaluation.measure:show_measures")(found, as_json=config.json)


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
    late("api.demo:run_demo")(**chosen)
