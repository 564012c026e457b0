"""The argument parser of every command, whose mistakes are one line."""

import argparse
import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from dschat_lora.config.help import (
    OTHER,
    HelpFormatter,
    choices_metavar,
    help_text,
    option_help,
)
from dschat_lora.config.hints import hint_for
from dschat_lora.config.values import (
    converter,
    is_switch,
    switch_converter,
    switch_words,
    value_shape,
)


class _HelpAction(argparse.Action):
    """Shows the help, and with the value ``all`` what is there for compatibility too."""

    def __call__(self, parser: Any, namespace: object, values: object, *_: object) -> None:
        """Print and exit."""
        parser.explains_all = values == "all"
        parser.print_help()
        parser.exit()


class _OnceAction(argparse.Action):
    """Stores a file of options, which is given once: by a second one the first would be lost."""

    def __call__(self, parser: Any, namespace: object, values: object, flag: Any = None) -> None:
        """Store it."""
        if getattr(namespace, self.dest, None) is not None:
            raise ValueError(f"{flag} is given twice")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of printing usage: a mistake is one line."""

    def __init__(
        self, prog: str, description: str | None = None, examples: str | None = None
    ) -> None:
        super().__init__(
            prog=prog,
            description=description and inspect.cleandoc(description),
            epilog=examples,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
            add_help=False,
        )
        self._sections = {OTHER: self._optionals}
        self.register("action", "once", _OnceAction)
        for name, kind in ((None, str), (int, int), (float, float)):
            self.register("type", name, converter(kind))
        self.explains_all = False
        self.add_argument(
            *("-h", "--help"),
            action=_HelpAction,
            nargs="?",
            metavar="all",
            default=argparse.SUPPRESS,
            help="show this help, or that of all options",
        )
        # By default -1e-4 is taken for an option.
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def format_help(self) -> str:
        """The help: usage, what the command does, examples, and its options by section."""
        return help_text(self, everything=self.explains_all)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument ", "", 1))

    def values(self, argv: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        """Values of the arguments; an option that is none of ``names`` is a ValueError."""
        chosen, unknown = self.parse_known_args(argv)
        if unknown:
            raise ValueError(unknown_option(unknown[0], names))
        return vars(chosen)

    def _get_values(self, action: argparse.Action, words: list[str]) -> Any:
        # argparse drops two dashes, also where they are a value.
        if action.option_strings and "--" in words:
            raise ValueError(f"{action.option_strings[0]} cannot be --, which ends the options")
        return super()._get_values(action, words)

    def add_file(self, name: str, help: str) -> None:
        """Add an option that names a file."""
        self.add_argument(f"--{name}", action="once", metavar="FILE", help=help)

    def add_ignored(self, names: Sequence[str]) -> None:
        """Add options that are accepted and not shown."""
        for name in names:
            self.add_argument(f"--{name}", nargs="?", help=argparse.SUPPRESS)

    def add_option(
        self,
        section: str,
        names: Sequence[str],
        field: dataclasses.Field[object],
        annotation: object,
    ) -> None:
        """Add an option of a config under its name, which comes first, and other spellings."""
        if section not in self._sections:
            self._sections[section] = self.add_argument_group(section)
        group, name, flags = self._sections[section], names[0], [f"--{each}" for each in names]
        shared: dict[str, Any] = {"default": argparse.SUPPRESS, "help": option_help(field)}
        if annotation is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **shared)
            return
        if is_switch(annotation):
            words = switch_words(annotation)
            shared |= {"type": switch_converter(words), "metavar": "{" + ",".join(words) + "}"}
            group.add_argument(*flags, nargs="?", const=True, **shared)
            shared = {"default": argparse.SUPPRESS, "help": f"same as --{name} off"}
            group.add_argument(
                f"--no-{name}", dest=name, action="store_const", const=False, **shared
            )
            return
        kind, choices, many = value_shape(annotation)
        shared["metavar"] = choices_metavar(choices, spellings=len(flags)) if choices else None
        if shared["metavar"] is None:
            shared["metavar"] = {int: "N", float: "X"}.get(kind, "NAME" if choices else "TEXT")
            shared["help"] = option_help(field, choices)
        if many:
            shared["nargs"] = "*"
        hint = field.metadata.get("hint", "")
        group.add_argument(*flags, type=converter(kind, choices, hint=hint), **shared)


def unknown_option(text: str, names: Collection[str]) -> str:
    """The message about ``text``, which is none of ``names``."""
    if not text.startswith("-"):
        return f"unexpected argument {text!r}; options start with --"
    given = text.split("=")[0]
    if hint := hint_for(given.lstrip("-"), names):
        return f"unknown option {given}; {hint}"
    spelled = given.replace("-", "_").replace("__", "--", 1)
    close = difflib.get_close_matches(spelled, [f"--{name}" for name in names], 1)
    return f"unknown option {given}" + (f"; did you mean {close[0]}?" if close else "; see --help")
