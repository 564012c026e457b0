"""Options that change nothing: the conditions of their declarations, and the words about them."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dschat_lora.config.options import (
    ELSEWHERE,
    NEVER,
    When,
    command_line,
    flatten,
    nested_prefix,
    option_fields,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dschat_lora.config.options import StageOptions

_AT_NO_TIME = {NEVER: " here", ELSEWHERE: " in this stage"}
_OFF = (None, False, 0, "", (), "none")
_TERM = re.compile(r"(not )?(\w+)(?:([=>])(\S+))?")


def no_effect(option: str, why: str) -> str:
    """The message about an option, with its value where that matters; ``why`` follows at once."""
    return f"--{option} has no effect{why}"


def base_rate_note(value: Callable[[str], Any]) -> str:
    """A message where ``--learning_rate`` is of base weights, and adapters alone train."""
    rates = ("learning_rate", "lora_learning_rate", "default_lora_learning_rate")
    rate, own, default = map(value, rates)
    if not (value("lora_dim") and value("only_optimize_lora")) or own == rate:
        return ""
    # Otherwise the adapters' rate comes from it.
    if own is None and (rate == "auto" or value("lora_lr_multiplier") or default is None):
        return ""
    why = f": only adapters are trained, at --lora_learning_rate {own or default:g}"
    return no_effect("learning_rate", why)


def without_effect(config: "StageOptions") -> list[str]:
    """A message for each option that was given and changes nothing, as its ``when`` says.

    One is for all that no stage uses. An option that is off, as by default, is passed over.
    """
    values, options = flatten(config), option_fields(type(config))

    def is_off(name: str) -> bool:  # an empty list is not: a check may have emptied it
        return values[name] in _OFF and options[name][0].default in _OFF

    given = [(n, m) for n, m in messages(config) if m and n in config.given and not is_off(n)]
    never = [name for name, _ in given if NEVER in options[name][0].metadata["when"]]
    said = [message for name, message in given if name not in never]
    if never:
        names = ", ".join(f"--{name}" for name in never)
        said.append(f"accepted without effect: {names} (--help compatibility says why)")
    return said


def messages(config: "DataclassInstance") -> Iterator[tuple[str, str]]:
    """(name, message) of every option that has conditions, empty where they hold.

    Conditions of the stage, its ``when``, take the place of those of groups and options.

    Raises:
        LookupError: if a condition names nothing that the config has.
    """
    values = _Values(config)
    of_stage = getattr(config, "when", {})
    for name, (field, _) in values.options.items():
        conditions = [of_stage[name]] if name in of_stage else field.metadata["when"]
        if name in values.also_when:
            more = values.also_when[name]
            conditions = [f"{e} or {more}" if e and isinstance(e, str) else e for e in conditions]
        said = [values.message(name, c, field.metadata["prefix"]) for c in conditions if c]
        if said:
            yield name, next(filter(None, said), "")


class _Values:
    """The values of a config by name, those of its groups' other fields and properties too."""

    def __init__(self, config: "DataclassInstance") -> None:
        self.options = option_fields(type(config))
        self._groups = list(_groups(config))
        self.also_when: dict[str, str] = {}  # of options of others, by a group that uses them
        for _, each in self._groups:
            self.also_when |= getattr(each, "also_when", {})

    def message(self, option: str, condition: When, prefix: str) -> str:
        """The message about an option under a condition; empty where that holds."""
        if callable(condition):
            return condition(lambda name: self._find(name, prefix)[1])
        if condition in _AT_NO_TIME:
            return no_effect(option, _AT_NO_TIME[condition])
        reasons = [self._failure(term, prefix) for term in condition.split(" or ")]
        if not all(reasons):
            return ""
        reasons.sort(key=lambda words: words.startswith("with "))
        return no_effect(option, f" {' and '.join(reasons)}".replace(" and without ", " or "))

    def _failure(self, term: str, prefix: str) -> str:
        """What was given that rules a term out, or is missing; empty where the term holds."""
        match = _TERM.fullmatch(term)
        assert match is not None, term
        negated, name, sign, bound = match.groups()
        option, value = self._find(name, prefix)

        def holds(value: object) -> bool:
            if sign == ">":
                return isinstance(value, int | float) and value > float(bound)
            is_so = value in bound.split(",") if sign else value not in _OFF
            return bool(is_so != bool(negated))

        if holds(value):
            return ""
        if option not in self.options:
            return f"without a {option.removeprefix('has_').replace('_', ' ')}"
        default = self.options[option][0].default
        if negated and not sign:
            return f"without --no-{option}" if default is True else f"with --{option}"
        if negated or holds(default):
            return f"with {' '.join(command_line({option: value}))}"
        wanted = f"above {bound}" if sign == ">" else (bound or "").replace(",", " or ")
        return f"without --{option} {wanted}".rstrip()

    def _find(self, name: str, prefix: str) -> tuple[str, Any]:
        """The whole name and the value of a name in a condition of an option with this prefix."""
        for whole in (prefix + name, name):
            for start, group in self._groups:
                own = whole.removeprefix(start)
                if whole.startswith(start) and hasattr(group, own):
                    return whole, getattr(group, own)
        raise LookupError(f"no option, field or property is called {name}")


def _groups(config: "DataclassInstance", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(prefix of its options, group) of a config itself and of every group in it."""
    yield prefix, config
    for field in dataclasses.fields(config):
        if "group" in field.metadata:
            yield from _groups(getattr(config, field.name), nested_prefix(prefix, field))
