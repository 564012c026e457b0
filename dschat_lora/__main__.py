"""Verbs of the ``dschat-lora`` command."""

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NamedTuple

from dschat_lora import __version__
from dschat_lora.commands.stages import STAGES
from dschat_lora.config.addons import installed, load, verb_path, verbs
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
    run: str  # MODULE:FUNCTION, which is imported when it is chosen


def main() -> None:
    """Run the verb given on the command line."""
    prepare_process()
    with ended_in_one_line():
        _run(*chosen_verb(sys.argv[1:], ("", *VERBS, *verbs())))


def _run(verb: str, argv: list[str]) -> None:
    if verb:
        hush_libraries()
        load(VERBS[verb].run if verb in VERBS else verb_path(verb))(argv)
    elif argv in (["-h"], ["--help"]):
        _show_help()
    elif argv == ["--version"]:
        log_once(f"dschat-lora {__version__}")
    elif not argv:
        fail("no verb is given, such as sft or demo; dschat-lora --help lists them")
    else:
        close = get_close_matches(argv[0], [*VERBS, *verbs()], 1)
        meant = f"did you mean {close[0]}?" if close else "dschat-lora --help lists them"
        fail(f"{argv[0]} is no verb; {meant}")


def _show_help() -> None:
    log_once("usage: dschat-lora VERB ...; dschat-lora VERB --help says more")
    for title, names in GROUPS.items():
        log_once(f"\n{title}:")
        for name in names:
            log_once(f"  {name:<10}{VERBS[name].help}")
    log_once("\nadd-ons:")
    for name, summary in _of_addons().items():
        log_once(f"  {name:<10}{summary}")


def _of_addons() -> Mapping[str, str]:
    """The summaries of the verbs of add-ons."""
    return {
        name: addon.summaries.get(name, f"of the add-on {addon.name}")
        for addon in installed().values()
        for name in addon.verbs
    }


VERBS = {
    **{n: Verb(stage.summary, f"dschat_lora.commands.train:{n}") for n, stage in STAGES.items()},
    "demo": Verb(
        "train on the bundled model and data, show what changed", "dschat_lora.api.demo:demo"
    ),
    **{
        name: Verb(summary, f"dschat_lora.commands.verbs:{name}")
        for name, summary in {
            "recipes": "list the recipes that come with the package",
            "audit": "show what a stage would learn of data",
            "report": "one page about runs: curves, results, time, settings",
            "rollouts": "look through a run's responses of step 3",
            "inspect": "say what a directory is, and how it came about",
            "generate": "answer prompts",
            "merge": "base and adapter as one transformers directory",
            "push": "upload an adapter or a model to the hub",
            "export": "convert an adapter or a model to GGUF",
            "extract": "LoRA and head of a full checkpoint to PEFT",
            "accept": "vouch for an adapter that was changed on purpose",
        }.items()
    },
}
GROUPS = {
    "train": (*STAGES, "demo"),
    "look": ("recipes", "audit", "inspect", "report", "rollouts"),
    "use": ("generate", "merge", "push", "export", "extract", "accept"),
}


if __name__ == "__main__":
    main()
