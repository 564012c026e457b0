"""Add-ons: what each of them adds, which are installed, and where their objects are found.

An add-on is a folder of ``dschat_lora/addons``, or any installed package with an entry point of the
group ``dschat_lora.addons`` that names an :class:`Addon`.
"""

import os
import pkgutil
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.options import group, option_names

GROUP = "dschat_lora.addons"
# What an add-on can provide by name: options take these names beside their own.
SEAMS: Mapping[str, str] = {
    "rollout_engine": "names of --rollout_engine: a class with draw(asked, sampling)",
    "environment": "names of --environment: a class, a function or a player",
    "reward_function": "names of --reward_function: a function or a scorer",
    "algorithm": "names of --algorithm: a function of the outcome, or an Algorithm",
    "options_file": "keys that make a file of --config more than options: a function (stage, file)",
    "row_format": "layouts of data files: a RowFormat",
}


_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class Addon:
    """What an add-on adds. Objects are named as ``module:object``, and imported when used.

    Attributes:
        name: its name, which its options begin with if it is not the package's own.
        verbs: of ``dschat-lora``, each a function of the list of its arguments.
        summaries: what each verb does, in a line of ``dschat-lora --help``.
        functions: names in ``dschat_lora``, for Python.
        options: by stage ("sft", "reward", "dpo", "rlhf", "distill"), or verb that takes some, a
            frozen dataclass of ``option(...)``; a stage has it as ``config.addons.NAME``.
        provides: by seam, one of ``SEAMS``, what an option's value names.
        needs: add-ons of the package that it does not work without.

    Raises:
        ValueError: for what cannot be one.
    """

    name: str
    verbs: Mapping[str, str] = field(default_factory=dict)
    summaries: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    provides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"{self.name!r} is no name of an add-on: use letters, digits and _")
        for seam in self.provides:
            if seam not in SEAMS:
                raise ValueError(f"it provides {seam!r}, which is none of {', '.join(SEAMS)}")
        for named in (self.verbs, self.functions, self.options, *self.provides.values()):
            for path in named.values():
                if not _PATH.fullmatch(path):
                    raise ValueError(f"{path!r} is not of the form module:object")


@cache
def installed() -> Mapping[str, Addon]:
    """The add-ons that are there by name, those of the package first.

    Another package's that cannot be used is left out, with a warning that names it.
    """
    from importlib.metadata import entry_points  # takes 20 ms

    found = {addon.name: addon for addon in map(_own, ADDONS) if addon}
    for entry in entry_points(group=GROUP):
        with left_out(entry.name):
            addon = entry.load()
            if not isinstance(addon, Addon):
                raise TypeError(f"{entry.value} is a {type(addon).__name__}, and no Addon")
            _check_is_new(addon, found)
            found[addon.name] = addon
    return found


def provided(seam: str) -> Mapping[str, str]:
    """``module:object`` by the names that add-ons provide under a seam of ``SEAMS``."""
    return {
        name: path
        for addon in installed().values()
        for name, path in addon.provides.get(seam, {}).items()
    }


def load(path: str) -> Any:
    """The object ``module:object`` of an add-on."""
    return pkgutil.resolve_name(path)


def verbs() -> list[str]:
    """Verbs of add-ons, those of the package's that are not installed too."""
    own = [verb for names in ADDONS.values() for verb in names.verbs.split()]
    others = [verb for addon in installed().values() for verb in addon.verbs if verb not in own]
    return own + others


def verb_path(verb: str) -> str:
    """``module:function`` of an add-on's verb.

    Raises:
        ValueError: if the add-on, or one that it needs, is not installed.
    """
    return _path_of(verb, "verbs", f"dschat-lora {verb}")


def function_path(name: str) -> str:
    """The same of a name that add-ons have in ``dschat_lora``."""
    return _path_of(name, "functions", f"dschat_lora.{name}")


def addon_options(command: str) -> type[Any]:
    """A dataclass with a group for each add-on that has options of a stage or a verb."""
    groups: list[tuple[str, type[Any], Any]] = []
    for name, addon in installed().items():
        if path := addon.options.get(command):
            with left_out(name) if name not in ADDONS else _as_it_is():
                options = load(path)
                if not (isinstance(options, type) and is_dataclass(options)):
                    raise TypeError(f"{path} is no dataclass of options")
                for each in option_names(options) if name not in ADDONS else ():
                    if not each.startswith(f"{name}_"):
                        raise ValueError(f"its option --{each} does not begin with {name}_")
                groups.append((name, options, group(options, section=f"add-on {name}")))
    return make_dataclass("AddonOptions", groups, frozen=True)


def check_needs(addon: Addon, shown: str) -> None:
    """Refuse what ``shown`` names where an add-on that it needs is not installed.

    Raises:
        ValueError: naming that add-on.
    """
    for each in addon.needs:
        if each not in installed():
            raise ValueError(f"{shown} needs the add-on {each}, which is not installed")


def groups_of(config: Any, method: str) -> Iterator[Any]:
    """The options of add-ons in a config whose class has a method of this name."""
    for each in fields(config.addons):
        if hasattr(own := getattr(config.addons, each.name), method):
            yield own


def _own(name: str) -> Addon | None:
    """The declaration of an add-on of the package, None where its folder is not there."""
    folder = f"{GROUP}.{name}"
    try:
        addon: Addon = import_module(f"{folder}.addon").ADDON
    except ModuleNotFoundError as error:
        if error.name in (GROUP, folder, f"{folder}.addon"):
            return None
        raise
    return addon


def _path_of(name: str, kind: str, shown: str) -> str:
    for addon in installed().values():
        if path := getattr(addon, kind).get(name):
            check_needs(addon, shown)
            return str(path)
    raise ValueError(f"{shown} is an add-on that is not installed")


def _check_is_new(addon: Addon, others: Mapping[str, Addon]) -> None:
    """Refuse names that other add-ons have.

    Raises:
        ValueError: naming what is there already.
    """
    if addon.name in ADDONS or addon.name in others:
        raise ValueError(f"there is another add-on {addon.name}")
    for other in others.values():
        pairs = [("verb", addon.verbs, other.verbs), ("function", addon.functions, other.functions)]
        pairs += [(s, addon.provides[s], other.provides.get(s, {})) for s in addon.provides]
        for kind, mine, theirs in pairs:
            if taken := sorted(mine.keys() & theirs.keys()):
                raise ValueError(f"the add-on {other.name} has the {kind} {taken[0]}, too")


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Warn where another package's add-on cannot be used, and go on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing else fails by it
        if os.environ.get("RANK", "0") == "0":
            words = f"the add-on {name} cannot be used and is left out: {error}"
            warnings.warn(" ".join(words.split()), stacklevel=2)
