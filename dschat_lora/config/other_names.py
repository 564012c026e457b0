"""Options of other trainers, those here that do the same, and options that are gone."""

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import NamedTuple

from dschat_lora.config.bundled import OTHER_NAMES

ROLES = ("actor", "critic")
GONE_SINCE = "0.3.0"
# Options that this version has no longer, and their values where they did nothing.
GONE: Mapping[str, object] = {
    **{"lr_probe": 0, "prompt_lookup_num_tokens": 0, "reward_gate": []},
    **{"rollout_temperature": None, "oversample": 1.0, "first_hour": False, "target_entropy": 0.0},
    **{"layerwise_lr_decay": 1.0, "mixture_temperature": 1.0},
}
# What does it instead, for commands that have the options which these words name.
INSTEAD: Mapping[str, str] = {
    "reward_gate": "a function of --reward_function can use the other's score itself",
    "rollout_temperature": "responses are sampled at --temperature",
    "oversample": "--max_num_seqs N sets the responses decoded at a time, with refill",
    "first_hour": "pytest -m gpu tests/gpu in a checkout tests a GPU",
    "target_entropy": "--entropy_coef X weighs the entropy bonus",
    "layerwise_lr_decay": "--target_modules adapts the upper layers alone by a regular expression",
    "mixture_temperature": "give fractions, as in --data_path a.jsonl:0.6 b/:0.4",
    "epochs": "--lora_path RUN/lora/epoch-1.safetensors --output_path FILE decodes with one epoch",
}


class OtherName(NamedTuple):
    """What does the same as an option of other trainers.

    Attributes:
        sources: the trainers that have it.
        options: those here that do the same; the first that a command has is named.
        words: what that option does; ``{}`` stands for it.
    """

    sources: tuple[str, ...]
    options: tuple[str, ...]
    words: str


@cache
def other_names() -> dict[str, list[OtherName]]:
    """The table of the package by name; of several rows the first with a command's option holds."""
    table: dict[str, list[OtherName]] = {}
    options: tuple[str, ...] = ()
    words = ""
    for line in OTHER_NAMES.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(": ")
        if line.startswith("--"):
            options, words = tuple(before.replace("--", "").split()), after
        elif line.startswith(" "):
            row = OtherName(tuple(before.strip().split(", ")), options, words)
            for name in after.split():
                table.setdefault(name, []).append(row)
    return table


def dotted_name(name: object, value: object) -> str:
    """``algorithm.gamma`` of a file with ``algorithm: {gamma: 1}``, as other trainers' are."""
    parts = {*other_names(), "trl.*"}
    while isinstance(value, Mapping) and value and any(x.startswith(f"{name}.") for x in parts):
        part, value = next(iter(value.items()))
        name = f"{name}.{part}"
    return str(name)


def gone(name: str, known: Collection[str]) -> str | None:
    """The message about an option that a command with ``known`` options had; None: it had none."""
    words = INSTEAD.get(name, "")
    if not {*re.findall(r"--(\w+)", words)} <= {*known}:
        words = ""
    if name not in GONE and not words:
        return None
    return f"option --{name} was removed in version {GONE_SINCE}; {words or 'drop it'}"


def same_here(name: str, known: Collection[str]) -> str | None:
    """What of ``known`` does the same as option ``name`` of another trainer; None without it."""
    role, _, rest = name.partition("_")  # actor_lora_rank is --actor_lora_dim
    for part, prefix in ((name, ""), (rest, f"{role}_") if role in ROLES else ("", "")):
        for row in other_names().get(part, ()):
            for option in row.options:
                here = prefix + option.removeprefix(prefix)
                if here in known:
                    return row.words.replace("{}", f"--{here}")
    return None
