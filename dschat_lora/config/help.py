"""Help of a command: an example first, then options in the order in which a person needs them."""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

# Titles that several groups of options use.
EVALUATION, LOGGING = "evaluation", "logging"
PROCESSES = "memory and processes"
# Sections in their order, each with the options that come first in it.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "actor": ("actor_model_name_or_path", "actor_lora_dim"),
    "critic and reward model": ("critic_model_name_or_path", "critic_lora_dim"),
    "model": ("model_name_or_path",),
    "data": ("data_path", "eval_data_path", "eval_ratio", "max_seq_len", "packing"),
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
# Longer lists of choices stand in the text, not beside the option's name.
_LONGEST_METAVAR = 40
# What examples begin with.
_EXAMPLES = "examples:"


def section_of(field: dataclasses.Field[object], config_class: type, role: str) -> str:
    """The section of an option: its own, that of its role, or that of the class with the field."""
    own: str | None = field.metadata.get("section")
    return own or role or str(getattr(config_class, "section", OTHER))


def by_section(sections: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names of options by section, from pairs of both, in the order of ``SECTIONS``."""
    found: dict[str, list[str]] = {title: [] for title in (*SECTIONS, OTHER, COMPATIBILITY)}
    for name, section in sections:
        found[section].append(name)
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


def choices_metavar(choices: Sequence[object], *, spellings: int) -> str | None:
    """The choices as they stand beside each spelling of an option; None where they are too long."""
    text = "{" + ",".join(map(str, choices)) + "}"
    return text if spellings * len(text) <= _LONGEST_METAVAR else None


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs of text, and leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip("\n").split("\n\n")
        return "\n\n".join(
            part
            if part.startswith((_EXAMPLES, " "))
            else super(HelpFormatter, self)._fill_text(part, width, indent)
            for part in parts
        )


def help_text(parser: argparse.ArgumentParser, *, everything: bool) -> str:
    """Usage, what the command does, examples, and its options by section."""
    formatter = parser._get_formatter()
    groups = [group for group in parser._action_groups if group._group_actions]
    last = (OTHER, COMPATIBILITY)
    groups.sort(key=lambda group: last.index(group.title) + 1 if group.title in last else 0)
    sections = any(group.title in SECTIONS for group in groups)
    explained = [group for group in groups if everything or group.title != COMPATIBILITY]
    formatter.add_usage(_usage(parser), [], [])
    formatter.add_text(parser.description)
    formatter.add_text(parser.epilog)
    for group in explained:
        formatter.start_section(
            "other options" if group.title == OTHER and sections else group.title
        )
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    for group in groups:
        if group not in explained:
            names = ", ".join(action.option_strings[0] for action in group._group_actions)
            formatter.add_text(f"For compatibility, explained by --help all: {names}.")
    return formatter.format_help()


def _usage(parser: argparse.ArgumentParser) -> str:
    """The command, its positional arguments, and that options follow."""
    words = [parser.prog]
    for action in parser._actions:
        if not action.option_strings:
            words.append(f"{action.metavar or action.dest}{' ...' * (action.nargs == '+')}")
    return " ".join([*words, "[--OPTION VALUE ...]"])
