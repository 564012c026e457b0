"""The argument parser of every command: mistakes in one line, help in sections."""

import argparse
import copy
import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from dschat_lora.config.values import converter, is_switch, number_words, switch_words, value_shape

# Titles that several groups of options use.
EVALUATION, LOGGING = "evaluation", "logging"
PROCESSES = "memory and processes"
# Sections in the order of need; what is of no section and what is of add-ons follows.
SECTIONS = (
    *("actor", "critic and reward model", "model", "data", "filtering", "training", "LoRA"),
    *("preferences", "rollouts", "rewards", "algorithm"),
    *("output and checkpoints", EVALUATION, LOGGING, PROCESSES),
)
# Options without a section.
OTHER = "options"
# What is accepted from other programs, or says once more what another option says.
COMPATIBILITY = "compatibility"
# Options in the order of their use, behind those that a command declares as its ``everyday``.
# Where it declares some, --help shows the first MOST that it has.
EVERYDAY = (
    *("model_name_or_path", "data_path", "lora_dim", "learning_rate", "num_train_epochs"),
    *("max_steps", "output_dir", "resume_from_checkpoint", "eval_interval", "dry_run"),
    *("report_to", "base_bits", "max_seq_len", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "lora_alpha", "zero_stage", "columns", "eval_data_path"),
    *("gradient_checkpointing", "target_modules", "seed", "packing", "num_warmup_steps"),
    *("deepspeed_config", "dtype", "lr_scheduler_type", "tokens_per_device", "eval_ratio"),
    *("lora_learning_rate", "lora_lr_multiplier", "verbose", "overwrite_output_dir"),
    *("save_interval", "merge_adapter", "offload_activations", "logging_steps"),
)
MOST = 20


def by_section(sections: Mapping[str, str], everyday: Sequence[str] = ()) -> dict[str, list[str]]:
    """Names of options by section, from the section of each: both in the order of use.

    ``everyday`` are those that come before those of ``EVERYDAY``.
    """
    by_title: dict[str, list[str]] = {title: [] for title in (*SECTIONS, OTHER)}
    first = [*everyday, *EVERYDAY]
    for name in sorted(sections, key=lambda n: first.index(n) if n in first else len(first)):
        by_title.setdefault(sections[name], []).append(name)
    by_title[COMPATIBILITY] = by_title.pop(COMPATIBILITY, [])
    return {title: names for title, names in by_title.items() if names}


def everyday_options(names: Collection[str], first: Sequence[str]) -> list[str]:
    """Those of ``names`` that ``--help`` shows; ``first`` come before those of ``EVERYDAY``."""
    return [name for name in dict.fromkeys((*first, *EVERYDAY)) if name in names][:MOST]


def _place(title: str | None) -> int:
    """Where a section stands, of which those of one place keep their order."""
    if title is not None and title.startswith("add-on "):
        return 2
    return {OTHER: 1, COMPATIBILITY: 3}.get(title or "", 0)


def option_help(field: dataclasses.Field[object], choices: Sequence[object] = ()) -> str:
    """The help text; its first line has ``choices`` and a default, but for absent, empty, False."""
    text, *more = field.metadata["help"].replace("%", "%%").split("\n")
    if choices:
        text += f"; one of {', '.join(map(str, choices))}"
    default = field.default
    # By identity: 0 == False, and a default of 0 is shown.
    if default is not False and default not in (None, (), dataclasses.MISSING):
        shown = " ".join(default) if isinstance(default, tuple) else default
        text += f" (default: {shown})"
    return "\n".join([text, *more])


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs of text, and leaves the lines of examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part
            if part.startswith(("examples:", " "))
            else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in parts
        )


class _HelpAction(argparse.Action):
    """Shows the help of everyday options, of ``all``, or of those that a word finds."""

    def __call__(self, parser: Any, namespace: object, values: object, *_: object) -> None:
        """Print and exit."""
        parser.asked = values
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
        self.everyday: Collection[str] | None = None  # those of --help, None where it shows all
        self.asked: str | None = None  # the value of --help
        self.add_argument(
            *("-h", "--help"),
            action=_HelpAction,
            nargs="?",
            metavar="WORD",
            default=argparse.SUPPRESS,
            help="show this help, all options, or those matching a word",
        )
        # By default -1e-4 is taken for an option.
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def format_help(self) -> str:
        """Usage, what the command does, examples, and options that are asked for, by section."""
        usage = [self.prog]
        for action in self._actions:
            if not action.option_strings:
                usage.append(f"{action.metavar or action.dest}{' ...' * (action.nargs == '+')}")
        formatter = self._get_formatter()
        formatter.add_usage(" ".join([*usage, "[--OPTION VALUE ...]"]), [], [])
        if self.asked in (None, "all"):
            formatter.add_text(self.description)
            formatter.add_text(self.epilog)
        in_short = self.asked is None and self.everyday is not None
        sections = any(group.title in SECTIONS for group in self._action_groups)
        listed, left = list[argparse.Action](), dict[str | None, int]()
        for group in sorted(self._action_groups, key=lambda group: _place(group.title)):
            title = "other options" if group.title == OTHER and sections else group.title
            actions = [each for each in group._group_actions if each.help != argparse.SUPPRESS]
            shown = [each for each in actions if self._is_asked_for(each, title or "")]
            formatter.start_section(title)
            for action in map(copy.copy, shown):
                text, *more = (action.help or "").split("\n")
                action.help = text if in_short else "; ".join([text, *more])
                formatter.add_argument(action)
            formatter.end_section()
            if count := len({each.dest for each in actions} - {each.dest for each in shown}):
                left[title] = count
            listed += shown
        if not listed:
            raise ValueError(
                f"--help {self.asked}: no option or heading contains this word; see --help all"
            )
        if in_short and left:
            formatter.add_text(
                f"{sum(left.values())} more options: --help all shows all of them; --help WORD "
                "those whose heading or name contains WORD, as in --help lora. By heading: "
                f"{', '.join(f'{title} {count}' for title, count in left.items())}."
            )
        return formatter.format_help()

    def _is_asked_for(self, action: argparse.Action, heading: str) -> bool:
        flags, word = action.option_strings, self.asked
        if word is None:
            return self.everyday is None or not flags or flags[0].lstrip("-") in self.everyday
        return word == "all" or any(word.lower() in each for each in (heading.lower(), *flags))

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
            raise ValueError(
                f"{action.option_strings[0]} cannot be --, which marks the end of options"
            )
        return super()._get_values(action, words)

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
            in_words = converter(str, tuple(words))
            shared |= {
                "type": lambda text: {"on": True, "off": False}.get(text, in_words(text)),
                "metavar": "{" + ",".join(words) + "}",
            }
            group.add_argument(*flags, nargs="?", const=True, **shared)
            shared = {"default": argparse.SUPPRESS, "help": f"same as --{name} off"}
            group.add_argument(
                f"--no-{name}", dest=name, action="store_const", const=False, **shared
            )
            return
        kind, choices, many = value_shape(annotation)
        shared["metavar"] = "{" + ",".join(map(str, choices)) + "}"
        # Longer lists of choices stand in the text, not beside each spelling of the option.
        if not choices or len(flags) * len(shared["metavar"]) > 40:
            shared["metavar"] = {int: "N", float: "X"}.get(kind, "NAME" if choices else "TEXT")
            names = field.metadata.get("names", ())
            own = ("or your own module:object",) if names else ()
            shared["help"] = option_help(field, (*choices, *names, *own))
        if many:
            shared["nargs"] = "*"
        hint = field.metadata.get("hint", "")
        convert = converter(kind, choices, words=number_words(annotation), hint=hint)
        group.add_argument(*flags, type=convert, **shared)


def unknown_option(text: str, names: Collection[str]) -> str:
    """The message about ``text``, which is none of ``names``."""
    from dschat_lora.config.other_names import gone, other_names, same_here

    given = text.split("=")[0]
    # Without the part of an axolotl file that has TRL's.
    name = given.lstrip("-+").replace("-", "_").removeprefix("trl.")
    if message := gone(name, names):
        return message
    same = same_here(name, names)
    if not text.startswith("-"):
        return f"unexpected argument {text!r}; options start with --" + (
            f"; {same}" if same else ""
        )
    close = [] if same else _nearest(name, names, others=other_names())
    meant = f"did you mean {' or '.join(f'--{each}' for each in close)}?" if close else "see --help"
    return f"unknown option {given}; {same or meant}"


def _nearest(given: str, names: Collection[str], *, others: Collection[str]) -> Sequence[str]:
    """Names that ``given`` may stand for: one or two that have its words, or one spelt like it.

    What another trainer calls by a name, one of ``others``, is no part of one of ours.
    """
    if given in names:
        return [given]
    words = {name: set(name.split("_")) for name in names}
    some = set(given.split("_"))
    longer = [name for name in names if some <= words[name] and 3 * len(some) >= len(words[name])]
    shorter = [name for name in longer if 2 * len(some) >= len(words[name])]
    if len(longer) > 2 or not shorter:
        fewest = min((len(words[name]) for name in shorter), default=0)
        longer = [name for name in shorter if len(words[name]) == fewest]
    if 0 < len(longer) <= 2 and given not in others:
        return longer
    # One letter of a short name may be wrong, and a sixth of a long one.
    cutoff = max(0.6, min(0.84, 1 - 1.1 / max(len(given), 1)))
    return difflib.get_close_matches(given, names, 1, cutoff)
