"""The argument parser of every command: mistakes in one line, help in sections."""

import argparse
import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from dschat_lora.config.other_names import other_names, plain_name, same_here
from dschat_lora.config.values import (
    converter,
    is_switch,
    number_words,
    switch_words,
    value_shape,
)

# Titles that several groups of options use.
EVALUATION, LOGGING = "evaluation", "logging"
PROCESSES = "memory and processes"
# Sections in their order, each with the options that come first in it.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "actor": ("actor_model_name_or_path", "actor_lora_dim"),
    "critic and reward model": ("critic_model_name_or_path", "critic_lora_dim"),
    "model": ("model_name_or_path",),
    "data": ("data_path", "eval_data_path", "eval_ratio", "max_seq_len", "packing"),
    "filtering": (),
    "training": (
        *("num_train_epochs", "max_steps", "per_device_train_batch_size"),
        *("gradient_accumulation_steps", "tokens_per_device", "learning_rate"),
        *("lora_learning_rate", "lora_lr_multiplier", "lr_scheduler_type", "num_warmup_steps"),
    ),
    "LoRA": ("lora_dim", "lora_alpha", "target_modules"),
    "preferences": (),
    "rollouts": ("num_generations", "per_device_generation_batch_size", "generation_batches"),
    "rewards": ("reward_function", "reward_weights"),
    "algorithm": ("algorithm",),
    "distillation": ("teacher_model_name_or_path", "teacher_system_prompt", "distill_loss"),
    "output and checkpoints": (
        *("output_dir", "dry_run", "verbose", "resume_from_checkpoint", "overwrite_output_dir"),
    ),
    EVALUATION: ("eval_interval",),
    LOGGING: ("report_to", "logging_steps"),
    PROCESSES: (
        *("dtype", "gradient_checkpointing", "offload_activations", "zero_stage", "offload"),
    ),
}
# Options without a section, which come last.
OTHER = "options"
# What is accepted from other programs, or says once more what another option says.
COMPATIBILITY = "compatibility"


def by_section(sections: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names of options by section, from pairs of both, in the order of ``SECTIONS``.

    Sections of add-ons follow.
    """
    found: dict[str, list[str]] = {title: [] for title in (*SECTIONS, OTHER, COMPATIBILITY)}
    for name, section in sections:
        found.setdefault(section, []).append(name)
    for title, first in SECTIONS.items():
        found[title].sort(key=lambda name: first.index(name) if name in first else len(first))
    return {title: names for title, names in found.items() if names}


def option_help(field: dataclasses.Field[object], choices: Sequence[object] = ()) -> str:
    """The help text with ``choices`` and the default, unless that is absent, empty or False."""
    text: str = field.metadata["help"].replace("%", "%%")
    if choices:
        text += f"; one of {', '.join(map(str, choices))}"
    default = field.default
    # By identity: 0 == False, and a default of 0 is shown.
    if default is False or default in (None, (), dataclasses.MISSING):
        return text
    return f"{text} (default: {' '.join(default) if isinstance(default, tuple) else default})"


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs of text, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part
            if part.startswith(("examples:", " "))
            else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in parts
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
        """Usage, what the command does, examples, and its options by section."""
        usage = [self.prog]
        for action in self._actions:
            if not action.option_strings:
                usage.append(f"{action.metavar or action.dest}{' ...' * (action.nargs == '+')}")
        formatter = self._get_formatter()
        formatter.add_usage(" ".join([*usage, "[--OPTION VALUE ...]"]), [], [])
        formatter.add_text(self.description)
        formatter.add_text(self.epilog)
        groups = [group for group in self._action_groups if group._group_actions]
        last = (OTHER, COMPATIBILITY)
        groups.sort(key=lambda group: last.index(group.title) + 1 if group.title in last else 0)
        sections = any(group.title in SECTIONS for group in groups)
        explained = [g for g in groups if self.explains_all or g.title != COMPATIBILITY]
        for group in explained:
            others = group.title == OTHER and sections
            formatter.start_section("other options" if others else group.title)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        for group in groups:
            if group not in explained:
                names = ", ".join(action.option_strings[0] for action in group._group_actions)
                formatter.add_text(f"For compatibility, explained by --help all: {names}.")
        return formatter.format_help()

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
            own = ("or module:object of your own",) if names else ()
            shared["help"] = option_help(field, (*choices, *names, *own))
        if many:
            shared["nargs"] = "*"
        hint = field.metadata.get("hint", "")
        convert = converter(kind, choices, words=number_words(annotation), hint=hint)
        group.add_argument(*flags, type=convert, **shared)


def unknown_option(text: str, names: Collection[str]) -> str:
    """The message about ``text``, which is none of ``names``."""
    given = text.split("=")[0]
    name = plain_name(given)
    same = same_here(name, names)
    if not text.startswith("-"):
        return f"unexpected argument {text!r}; options start with --" + (
            f"; {same}" if same else ""
        )
    close = [] if same else _nearest(name, names)
    meant = f"did you mean {' or '.join(f'--{each}' for each in close)}?" if close else "see --help"
    return f"unknown option {given}; {same or meant}"


def _nearest(given: str, names: Collection[str]) -> Sequence[str]:
    """Names that ``given`` may stand for: one or two that have its words, or one spelt like it."""
    if given in names:
        return [given]
    words = {name: set(name.split("_")) for name in names}
    some = set(given.split("_"))
    longer = [name for name in names if some <= words[name] and 3 * len(some) >= len(words[name])]
    shorter = [name for name in longer if 2 * len(some) >= len(words[name])]
    if len(longer) > 2 or not shorter:
        fewest = min((len(words[name]) for name in shorter), default=0)
        longer = [name for name in shorter if len(words[name]) == fewest]
    # What another trainer calls by a name is no part of one of ours.
    if 0 < len(longer) <= 2 and given not in other_names():
        return longer
    # One letter of a short name may be wrong, and a sixth of a long one.
    cutoff = max(0.6, min(0.84, 1 - 1.1 / max(len(given), 1)))
    return difflib.get_close_matches(given, names, 1, cutoff)
