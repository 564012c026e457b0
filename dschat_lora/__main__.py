"""Verbs of the ``dschat-lora`` command."""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from dschat_lora import __version__
from dschat_lora.addons.serving.verbs import chat, serve
from dschat_lora.addons.tinker.verbs import checked, tinker
from dschat_lora.api import command_lines
from dschat_lora.commands import verbs
from dschat_lora.config.options import chosen_verb, fail
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.stage_main import (
    ended_in_one_line,
    hush_libraries,
    prepare_process,
)


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


VERBS = {
    **{
        name: Verb(summary, partial(command_lines.stage, name))
        for name, summary in command_lines.SUMMARIES.items()
    },
    **{
        name: Verb(summary, partial(command_lines.experiment, name))
        for name, summary in command_lines.EXPERIMENTS.items()
    },
    "pipeline": Verb("run all stages of a YAML file, or go on", verbs.pipeline),
    "tune": Verb("find a stage's rate, rank and batch by short runs", command_lines.tune),
    "demo": Verb("train on the bundled model and data, show what changed", command_lines.demo),
    "recipes": Verb("list the recipes that come with the package", verbs.list_recipes),
    "models": Verb("types of models, and what each can do", verbs.models),
    "audit": Verb("show what a stage would learn of data", command_lines.audit),
    "plan": Verb("memory, time and what fits, before a run", command_lines.plan),
    "doctor": Verb("whether this machine can train, and what to do", verbs.doctor),
    "report": Verb("one page about runs: curves, results, time, settings", verbs.report),
    "rollouts": Verb("look through a run's responses of step 3", verbs.rollouts),
    "inspect": Verb("say what a directory is, and how it came about", verbs.inspect),
    "chat": Verb("chat with models in the terminal", chat),
    "serve": Verb("serve models over HTTP, and a page to compare them", serve),
    "tinker": Verb(
        "train and sample over the Tinker API, on this machine",
        partial(command_lines.launched, "tinker", checked, tinker),
    ),
    "merge": Verb("base and adapter as one transformers directory", command_lines.merge),
    "generate": Verb("answer prompts", command_lines.generate),
    "eval": Verb("perplexity, preferences or rewards on rows of data", command_lines.evaluate),
    "score": Verb("score answers by a reward model", verbs.score),
    "push": Verb("upload an adapter or a model to the hub", verbs.push),
    "export": Verb("convert an adapter or a model to GGUF", verbs.export),
    "extract": Verb("LoRA and head of a full checkpoint to PEFT", verbs.extract),
    "accept": Verb("vouch for an adapter that was changed on purpose", verbs.accept),
}
GROUPS = {
    "train": ("sft", "reward", "dpo", "rlhf", "distill", "tune", "pipeline", "demo", "nlg", "glue"),
    "look": ("doctor", "models", "recipes", "plan", "audit", "inspect", "report", "rollouts"),
    "try": ("chat", "serve", "tinker", "generate", "eval", "score"),
    "carry away": ("merge", "push", "export", "extract", "accept"),
}


if __name__ == "__main__":
    main()
