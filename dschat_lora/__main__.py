"""Verbs of the ``dschat-lora`` command."""

import sys
from difflib import get_close_matches

from dschat_lora import __version__
from dschat_lora.config.addons import installed, load, verb_path, verbs
from dschat_lora.config.options import chosen_verb
from dschat_lora.config.verb_names import GROUPS, VERBS
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.stage_main import (
    ended_in_one_line,
    hush_libraries,
    prepare_process,
)


def main() -> None:
    """Run the verb given on the command line."""
    prepare_process()
    with ended_in_one_line():
        _run(*chosen_verb(sys.argv[1:], ("", *VERBS, *verbs())))


def _run(verb: str, argv: list[str]) -> None:
    if verb:
        hush_libraries()
        load(path_of(verb))(argv)
    elif argv in (["-h"], ["--help"]):
        _show_help()
    elif argv == ["--version"]:
        log_once(f"dschat-lora {__version__}")
    elif not argv:
        raise ValueError("no command given, such as sft or demo; dschat-lora --help lists them")
    else:
        close = get_close_matches(argv[0], [*VERBS, *verbs()], 1)
        meant = f"did you mean {close[0]}?" if close else "dschat-lora --help lists them"
        raise ValueError(f"unknown command {argv[0]}; {meant}")


def path_of(verb: str) -> str:
    """``module:function`` of a verb.

    Raises:
        ValueError: if it is of an add-on that is not installed.
    """
    if verb not in VERBS:
        return verb_path(verb)
    return f"dschat_lora.commands.{'train' if verb in GROUPS['train'] else 'verbs'}:{verb}"


def _show_help() -> None:
    log_once("usage: dschat-lora VERB ...; dschat-lora VERB --help lists its options")
    for title, own in GROUPS.items():
        log_once(f"\n{title}:")
        for name, summary in own.items():
            log_once(f"  {name:<10}{summary}")
    shown = [
        f"  {name:<10}{addon.summaries.get(name, f'of the add-on {addon.name}')}"
        for addon in installed().values()
        for name in addon.verbs
    ]
    log_once("\n".join(["\nadd-ons:", *shown] if shown else []))


if __name__ == "__main__":
    main()
