"""Verbs of the ``dschat-lora`` command."""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from logging import ERROR, LogRecord, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dschat_lora import __version__
from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.config.options import (
    Parser,
    chosen_verb,
    fail,
    parse_config,
    typed_options,
    unknown_option,
)
from dschat_lora.config.recipes import recipes
from dschat_lora.config.stages import AuditConfig, ScoreConfig
from dschat_lora.config.verbs import (
    EXAMPLES,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    InspectConfig,
    MergeConfig,
    PushConfig,
)
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.validation import check_glue
from dschat_lora.experiments.nlg.config import DecodeConfig, EvaluateConfig, NlgConfig
from dschat_lora.experiments.nlg.validation import check_decode, check_evaluate, check_training
from dschat_lora.pipeline.launch import launch_stage, split_launcher_options
from dschat_lora.pipeline.recipe import options_of_stage
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.pipeline.validation import check_stage
from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.rollout_words import show_rollouts
from dschat_lora.report.story import read_story
from dschat_lora.report.terminal import log_once, to_json
from dschat_lora.runtime import describe, gguf
from dschat_lora.runtime.stage_main import ended_in_one_line, run_main
from dschat_lora.runtime.validation import check_audit, check_eval, check_generate, check_score
from dschat_lora.serving.verbs import chat, serve

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ConfigT = TypeVar("ConfigT", bound="DataclassInstance")


class Verb(NamedTuple):
    """What a verb does, in a line, and the function of its arguments."""

    help: str
    run: Callable[[list[str]], None]


def late(path: str) -> Callable[..., Any]:
    """The function ``MODULE:NAME`` of the package, whose module is imported when it is called.

    What runs a verb is heavy; so a wrong option is reported at once.
    """

    def call(*values: Any, **named: Any) -> Any:
        module, _, name = path.partition(":")
        return getattr(import_module(f"dschat_lora.{module}"), name)(*values, **named)

    return call


def main() -> None:
    """Run the verb given on the command line."""
    verb, argv = chosen_verb(sys.argv[1:], ("", *VERBS))
    if verb:
        # It writes to the standard output, which results go to.
        getLogger("DeepSpeed").addFilter(_is_error)
        with ended_in_one_line():
            VERBS[verb].run(argv)
    elif argv in (["-h"], ["--help"]):
        _show_help()
    elif argv == ["--version"]:
        log_once(f"dschat-lora {__version__}")
    elif not argv:
        fail("no verb is given, such as sft, demo or pipeline; dschat-lora --help lists them")
    else:
        close = get_close_matches(argv[0], VERBS, 1)
        meant = f"did you mean {close[0]}?" if close else "dschat-lora --help lists them"
        fail(f"{argv[0]} is no verb; {meant}")


def _is_error(record: LogRecord) -> bool:
    return record.levelno >= ERROR


def _show_help() -> None:
    log_once("usage: dschat-lora VERB ...; dschat-lora VERB --help says more")
    for title, names in GROUPS.items():
        log_once(f"\n{title}:")
        for name in names:
            log_once(f"  {name:<10}{VERBS[name].help}")


# ---------------------------------------------------------------------------- stages

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


def _stage(name: str, argv: list[str]) -> None:
    """A stage in this process, or in those that the launcher starts."""
    launcher, rest = split_launcher_options(argv)
    program = f"dschat-lora {name}"
    if launcher is None:
        about, examples = f"{VERBS[name].help}.", EXAMPLES[name] + _PROCESSES
        run_stage(name, description=about, argv=rest, program=program, examples=examples)
        return
    read_file = partial(options_of_stage, name)
    config: Any = parse_config(STAGES[name].config, rest, program=program, read_file=read_file)
    check_stage(name, typed_options(config), launcher.processes)
    launch_stage(name, launcher, rest)


def run_nlg(
    argv: Sequence[str], *, description: str | None = None, program: str | None = None
) -> None:
    """The main function of GPT-2 on tables of data: train, decode or evaluate."""
    verb, argv = chosen_verb(argv, ("train", "decode", "evaluate"))
    run = partial(run_main, description=description, argv=argv, program=program)
    if verb == "train":
        run(NlgConfig, check_training, late("experiments.nlg.train:run_training"))
    elif verb == "decode":
        run(DecodeConfig, check_decode, late("experiments.nlg.decode:run_decode"))
    else:
        run(EvaluateConfig, check_evaluate, late("experiments.nlg.evaluate:run_evaluate"))


def run_glue(
    argv: Sequence[str], *, description: str | None = None, program: str | None = None
) -> None:
    """The main function of GLUE."""
    run = late("experiments.glue.stage:run_glue")
    run_main(GlueConfig, check_glue, run, description=description, argv=argv, program=program)


def _experiment(name: str, main_function: Callable[..., None], argv: list[str]) -> None:
    """The experiment of a paper in this process, or in those that the launcher starts."""
    launcher, rest = split_launcher_options(argv)
    if launcher is not None:
        launch_stage(name, launcher, rest)
    main_function(rest, description=f"{VERBS[name].help}.", program=f"dschat-lora {name}")


# ---------------------------------------------------------------------------- other verbs


def _demo(argv: list[str]) -> None:
    parser = Parser("dschat-lora demo", "Train on the bundled model and data, show what changed.")
    parser.add_argument(
        "--output_dir", metavar="DIR", help="default: the first free of output/demo, -2, -3, ..."
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=1234, help="of all stages (default: 1234)"
    )
    late("pipeline.demo:run_demo")(**_parsed(parser, argv, ["output_dir", "seed"]))


def _accept(argv: list[str]) -> None:
    parser = Parser("dschat-lora accept", "Vouch for an adapter that was changed on purpose.")
    parser.add_argument("adapter", help="its directory, whose manifest is written anew")
    directory = _parsed(parser, argv, [])["adapter"]
    accept_adapter(directory)
    log_once(f"{directory}: its files are the ones its manifest says")


def _recipes(argv: list[str]) -> None:
    parser = Parser("dschat-lora recipes", "List the recipes that come with the package.")
    parser.add_argument("--json", action="store_true", help="one JSON list on standard output")
    found = recipes()
    if _parsed(parser, argv, ["json"])["json"]:
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


def _audit(argv: list[str]) -> None:
    config = parse_config(
        AuditConfig,
        argv,
        description=AuditConfig.__doc__,
        program="dschat-lora audit DATA",
        positionals=("data_path",),
    )
    if not late("runtime.data_audit:audit_data")(check_audit(config)):
        raise SystemExit(1)


def _merge(argv: list[str]) -> None:
    late("runtime.merge:merge_model")(_parsed_config("merge RUN", MergeConfig, argv))


def _generate(argv: list[str]) -> None:
    config = _parsed_config("generate RUN [PROMPT ...]", GenerateConfig, argv, "prompts")
    check_generate(config)
    late("supervised.generate:generate_answers")(config)


def _eval(argv: list[str]) -> None:
    config = _parsed_config("eval RUN [DATA ...]", EvalConfig, argv, "data_path")
    late("supervised.measure:evaluate_model")(config, scores=check_eval(config))


def _inspect(argv: list[str]) -> None:
    if not describe.inspect_directory(_parsed_config("inspect DIRECTORY", InspectConfig, argv)):
        raise SystemExit(1)


def _report(argv: list[str]) -> None:
    parser = Parser(
        "dschat-lora report",
        "Write one page about runs: curves, results, time, settings.",
        "examples:\n  dschat-lora report output/sft output/reward output/rlhf",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="output directory of a run")
    parser.add_argument(
        "--output_path", metavar="FILE", help="default: report.html in the first directory"
    )
    chosen = _parsed(parser, argv, ["output_path"])
    homes = [Path(run).expanduser() for run in chosen["runs"]]
    for home in homes:
        if not (home / "run.json").is_file():
            raise ValueError(f"{home} holds no run.json: it is not the output directory of a run")
    path = Path(chosen["output_path"] or homes[0] / "report.html").expanduser()
    title = ", ".join(home.resolve().name for home in homes)
    write_report(path, render_report(title, [read_story(home) for home in homes], {}))
    log_once(f"report: {path}")


def _push(argv: list[str]) -> None:
    config = _parsed_config("push RUN REPO", PushConfig, argv, "repo")
    late("runtime.push:push_directory")(config)


def _export(argv: list[str]) -> None:
    if not gguf.export_gguf(_parsed_config("export RUN", ExportConfig, argv)):
        raise SystemExit(1)


def _parsed_config(usage: str, config_class: type[ConfigT], argv: list[str], *more: str) -> ConfigT:
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


def _score(argv: list[str]) -> None:
    config = _parsed_config("score RUN [DATA ...]", ScoreConfig, argv, "data_path")
    check_score(config)
    with ended_in_one_line(stopped="stopped; --output_path was not written"):
        late("supervised.score:score_files")(config)


def _extract(argv: list[str]) -> None:
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
        "--enable_lora", metavar="PART", nargs="*", default=[], help="q, k, v of packed layers"
    )
    parser.add_argument("--output_dir", metavar="DIR", help="default: CHECKPOINT/adapter")
    chosen = _parsed(parser, argv, ["base", "lora_alpha", "enable_lora", "output_dir"])
    chosen["enable_lora"] = tuple(chosen["enable_lora"])
    late("checkpoint.extract:extract")(**chosen, say=log_once)


def _pipeline(argv: list[str]) -> None:
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
    chosen = _parsed(parser, argv, ["output_dir", "num_gpus", "dry_run", "from", "set"])
    late("pipeline.run:run_pipeline")(**chosen)


def _parsed(parser: Parser, argv: list[str], names: list[str]) -> dict[str, Any]:
    """Values of a verb's arguments; an option that is none of ``names`` is a ValueError."""
    chosen, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(unknown_option(unknown[0], names))
    return vars(chosen)


def _rollouts(argv: list[str]) -> None:
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
    chosen = _parsed(parser, argv, [*numbers, "contains", "prompt", "limit", "json"])
    for name in (*numbers, "limit"):
        if chosen[name] < 0:
            raise ValueError(f"--{name} must be >= 0, got {chosen[name]}")
    if not any(chosen[name] for name in (*numbers, "contains", "prompt")):
        chosen |= {"best": 3, "worst": 3}
    show_rollouts(Path(chosen.pop("run")), **chosen)


VERBS = {
    "sft": Verb(
        "Step 1: supervised fine-tuning of a causal language model", partial(_stage, "sft")
    ),
    "reward": Verb("Step 2: a reward model from pairs of answers", partial(_stage, "reward")),
    "dpo": Verb("DPO, ORPO, SimPO or KTO: a policy without a reward model", partial(_stage, "dpo")),
    "rlhf": Verb(
        "Step 3: PPO, RLOO or GRPO of an actor on its own responses", partial(_stage, "rlhf")
    ),
    "nlg": Verb(
        "GPT-2 puts data into words: train, decode or evaluate",
        partial(_experiment, "nlg", run_nlg),
    ),
    "glue": Verb("GLUE with RoBERTa or DeBERTa-v2", partial(_experiment, "glue", run_glue)),
    "pipeline": Verb("run all stages of a YAML file, or go on", _pipeline),
    "demo": Verb("train on the bundled model and data, show what changed", _demo),
    "recipes": Verb("list the recipes that come with the package", _recipes),
    "audit": Verb("show what a stage would learn of data", _audit),
    "report": Verb("one page about runs: curves, results, time, settings", _report),
    "rollouts": Verb("look through a run's responses of step 3", _rollouts),
    "inspect": Verb("say what a directory is, and how it came about", _inspect),
    "chat": Verb("chat with models in the terminal", chat),
    "serve": Verb("serve models over HTTP, and a page to compare them", serve),
    "merge": Verb("base and adapter as one transformers directory", _merge),
    "generate": Verb("answer prompts", _generate),
    "eval": Verb("perplexity, preferences or rewards on rows of data", _eval),
    "score": Verb("score answers by a reward model", _score),
    "push": Verb("upload an adapter or a model to the hub", _push),
    "export": Verb("convert an adapter or a model to GGUF", _export),
    "extract": Verb("LoRA and head of a full checkpoint to PEFT", _extract),
    "accept": Verb("vouch for an adapter that was changed on purpose", _accept),
}
GROUPS = {
    "train": ("sft", "reward", "dpo", "rlhf", "pipeline", "demo", "nlg", "glue"),
    "look": ("recipes", "audit", "inspect", "report", "rollouts"),
    "try": ("chat", "serve", "generate", "eval", "score"),
    "carry away": ("merge", "push", "export", "extract", "accept"),
}


if __name__ == "__main__":
    main()
