"""Verbs of the ``dschat-lora`` command."""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

from dschat_lora import __version__
from dschat_lora.api import command_lines
from dschat_lora.config.options import chosen_verb, fail, flatten
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.validation import check_glue, fix_environment
from dschat_lora.experiments.nlg.config import DecodeConfig, EvaluateConfig, NlgConfig
from dschat_lora.experiments.nlg.original import scorer_arguments
from dschat_lora.experiments.nlg.scorer_files import FormatConfig, check_format, run_format
from dschat_lora.experiments.nlg.validation import check_decode, check_evaluate, check_training
from dschat_lora.pipeline import file_verbs, stage_verbs
from dschat_lora.pipeline.launch import (
    launch_command,
    launch_stage,
    launcher_command,
    run_or_end,
    split_launcher_options,
)
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.seeds import run_seeds
from dschat_lora.runtime.stage_main import (
    ended_in_one_line,
    exits,
    hush_libraries,
    late,
    prepare_process,
    run_main,
)
from dschat_lora.serving.verbs import chat, serve


class Verb(NamedTuple):
    """What a verb does, in a line, and the function of its arguments."""

    help: str
    run: Callable[[list[str]], None]


def main() -> None:
    """Run the verb given on the command line."""
    prepare_process()
    with ended_in_one_line():
        _run(*chosen_verb(sys.argv[1:], ("", *VERBS)))


def _run(verb: str, argv: list[str]) -> None:
    if verb:
        hush_libraries()
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


def _show_help() -> None:
    log_once("usage: dschat-lora VERB ...; dschat-lora VERB --help says more")
    for title, names in GROUPS.items():
        log_once(f"\n{title}:")
        for name in names:
            log_once(f"  {name:<10}{VERBS[name].help}")


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
        main_function = exits(late("experiments.nlg.train:run_training"))
        run(NlgConfig, check_training, _once_or_by_seeds("nlg", main_function, command))
    elif verb in ("decode", "beam"):
        run(DecodeConfig, check_decode, late("experiments.nlg.decode:run_decode"))
    elif verb == "format":
        run(FormatConfig, check_format, run_format)
    else:
        run(EvaluateConfig, check_evaluate, late("experiments.nlg.evaluate:run_evaluate"))


def run_glue(
    argv: Sequence[str],
    *,
    description: str | None = None,
    program: str | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """The main function of GLUE; ``command`` starts each run of ``--seeds``."""
    fix_environment()
    run = _once_or_by_seeds("glue", exits(late("experiments.glue.stage:run_glue")), command)
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


def _experiment(name: str, main_function: Callable[..., None], argv: list[str]) -> None:
    """The experiment of a paper in this process, or in those that the launcher starts.

    Of several seeds each run has processes of the launcher.
    """
    launcher, rest = split_launcher_options(argv)
    command = None
    if launcher is not None:
        command = launch_command(name, launcher, (), program=launcher_command())
        if not any(word.split("=")[0] == "--seeds" for word in rest):
            launch_stage(name, launcher, rest)
    texts = {"description": f"{VERBS[name].help}.", "program": f"dschat-lora {name}"}
    main_function(rest, **texts, command=command)


VERBS = {
    **{
        name: Verb(summary, partial(command_lines.stage, name))
        for name, summary in command_lines.SUMMARIES.items()
    },
    "nlg": Verb(
        "GPT-2 puts data into words: train, decode, format or evaluate",
        partial(_experiment, "nlg", run_nlg),
    ),
    "glue": Verb("GLUE with RoBERTa or DeBERTa-v2", partial(_experiment, "glue", run_glue)),
    "pipeline": Verb("run all stages of a YAML file, or go on", stage_verbs.pipeline),
    "demo": Verb("train on the bundled model and data, show what changed", command_lines.demo),
    "recipes": Verb("list the recipes that come with the package", file_verbs.list_recipes),
    "models": Verb("types of models, and what each can do", file_verbs.models),
    "audit": Verb("show what a stage would learn of data", command_lines.audit),
    "plan": Verb("memory, time and what fits, before a run", command_lines.plan),
    "doctor": Verb("whether this machine can train, and what to do", stage_verbs.doctor),
    "report": Verb("one page about runs: curves, results, time, settings", file_verbs.report),
    "rollouts": Verb("look through a run's responses of step 3", file_verbs.rollouts),
    "inspect": Verb("say what a directory is, and how it came about", file_verbs.inspect),
    "chat": Verb("chat with models in the terminal", chat),
    "serve": Verb("serve models over HTTP, and a page to compare them", serve),
    "merge": Verb("base and adapter as one transformers directory", command_lines.merge),
    "generate": Verb("answer prompts", command_lines.generate),
    "eval": Verb("perplexity, preferences or rewards on rows of data", command_lines.evaluate),
    "score": Verb("score answers by a reward model", file_verbs.score),
    "push": Verb("upload an adapter or a model to the hub", file_verbs.push),
    "export": Verb("convert an adapter or a model to GGUF", file_verbs.export),
    "extract": Verb("LoRA and head of a full checkpoint to PEFT", file_verbs.extract),
    "accept": Verb("vouch for an adapter that was changed on purpose", file_verbs.accept),
}
GROUPS = {
    "train": ("sft", "reward", "dpo", "rlhf", "pipeline", "demo", "nlg", "glue"),
    "look": ("doctor", "models", "recipes", "plan", "audit", "inspect", "report", "rollouts"),
    "try": ("chat", "serve", "generate", "eval", "score"),
    "carry away": ("merge", "push", "export", "extract", "accept"),
}


if __name__ == "__main__":
    main()
