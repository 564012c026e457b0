"""Add-ons: what each of them adds, which are installed, and where their objects are found.

An add-on is a folder of ``dschat_lora/addons``, or any installed package with an entry point of the
group ``dschat_lora.addons`` that names an :class:`Addon`.
"""

import os
import pkgutil
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.options import group, nested_prefix, option_names, parse_config
from dschat_lora.config.verb_names import COMMANDS, VERBS

GROUP = "dschat_lora.addons"
# What add-ons provide by names that options take, or under which the trunk looks for them.
SEAMS = (
    "rollout_engine",
    "reward_function",
    "reward_form",
    "algorithm",
    "answer_loss",
    "options_file",
    "row_format",
    "row_file",
    "media",
    "rest",
    "thumbnails",
    "observer",
    "run_view",
    "reference",
    "stage",
    "stored_form",
    "base_file",
    "base_distance",
    "advice",
    *(seam for names in ADDONS.values() for seam in names.seams.split()),
)


ConfigT = TypeVar("ConfigT")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Verbs of the package's add-ons.
_OWN_VERBS = tuple(verb for names in ADDONS.values() for verb in names.verbs.split())
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# Add-ons of which it was said that they are left out, for the processes that this one starts.
_LEFT_OUT = "DSCHAT_LORA_ADDONS_LEFT_OUT"


@dataclass(frozen=True)
class Addon:
    """What an add-on adds. Objects are named as ``module:object``, and imported when used.

    Attributes:
        name: of small letters, digits and _.
        verbs: of ``dschat-lora``, each a function of the list of its arguments.
        summaries: what each verb does, in a line of ``dschat-lora --help``.
        titles: what the report calls runs, by the name of their stage.
        functions: names in ``dschat_lora``, for Python; of the package's own add-ons alone.
        options: by command, one of ``COMMANDS`` or a verb of an add-on, a frozen dataclass of
            ``option(...)``, which a config has as ``config.addons.NAME``. Those of another package
            are typed as ``--NAME_OPTION``.
        provides: by seam, one of ``SEAMS``, what an option's value names; a name that ends in a
            colon or slash has all values that begin so, and its object is called with the value.
        needs: other add-ons that it does not work without.
        writes: what its runs write in their directories, beside what all write.

    Raises:
        TypeError: for a value of another type.
        ValueError: for what cannot be one.
    """

    name: str
    verbs: Mapping[str, str] = field(default_factory=dict)
    summaries: Mapping[str, str] = field(default_factory=dict)
    titles: Mapping[str, str] = field(default_factory=dict)
    functions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    provides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    needs: Sequence[str] = ()
    writes: Sequence[str] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        for name in (self.name, *self.verbs):
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a valid name: use lowercase letters, digits and _"
                )
        for seam in self.provides:
            if seam not in SEAMS:
                raise ValueError(f"it provides {seam!r}, which is not one of {', '.join(SEAMS)}")
        for command in self.options:
            if command not in (*COMMANDS, *_OWN_VERBS, *self.verbs):
                known = f"{', '.join(COMMANDS)} or an add-on's verbs"
                raise ValueError(f"it has options of {command!r}, none of {known}")
        for named in (self.verbs, self.functions, self.options, *self.provides.values()):
            for path in named.values():
                if not (isinstance(path, str) and _PATH.fullmatch(path)):
                    raise ValueError(f"{path!r} is not of the form module:object")


def _check_types(addon: Addon) -> None:
    for each in fields(addon):
        kind = {"name": str, "needs": list | tuple, "writes": list | tuple}.get(each.name, Mapping)
        if not isinstance(value := getattr(addon, each.name), kind):
            said = getattr(kind, "__name__", kind)
            raise TypeError(f"its {each.name} has {value!r}, which is not a {said}")


@cache
def installed() -> Mapping[str, Addon]:
    """The add-ons that are there by name, those of the package first.

    Another package's that cannot be used is left out, with a warning that names it.
    """
    from importlib.metadata import entry_points  # takes 10 ms

    by_name = {addon.name: addon for addon in map(_own, ADDONS) if addon}
    for entry in entry_points(group=GROUP):
        origin = f"{entry.name} of the package {entry.dist.name}" if entry.dist else entry.name
        with left_out(origin):
            addon = _new_addon(entry.load(), by_name)
            by_name[addon.name] = addon
    return by_name


@cache
def provided(seam: str, *taken: str) -> Mapping[str, str]:
    """``module:object`` by the names that add-ons provide under a seam of ``SEAMS``.

    The names ``taken`` are the trunk's own.
    """
    paths = dict[str, str]()
    for addon in installed().values():
        names = addon.provides.get(seam, {})
        with left_out(addon.name):
            _check_new(f"name under {seam}", names, {"the package": taken})
            paths |= names
    return paths


def provided_name(seam: str, value: str, *taken: str, shown: str = "") -> str:
    """The name of ``provided(seam, *taken)`` that a value is of; empty if it is of none.

    The object of a name that :func:`begins_values` is called with the whole value. What is wrong is
    told of ``shown``, by itself of an option that has the seam's name.

    Raises:
        ValueError: if it is of an add-on of the package that is not installed.
    """

    def found(names: Collection[str]) -> str:
        fits = (name for name in names if begins_values(name) and value.startswith(name))
        return value if value in names else next(fits, "")

    if name := found(provided(seam, *taken)):
        return name
    for addon, own in ADDONS.items():
        if addon not in installed() and found(own.under(seam)):
            shown = shown or f"--{seam} {value}"
            raise ValueError(f"{shown} is of the add-on {addon}, which is not installed")
    return ""


def value_names(seam: str) -> tuple[str, ...]:
    """The names under a seam, those of the package's add-ons that are not installed too."""
    own = (name for names in ADDONS.values() for name in names.under(seam))
    return (*dict.fromkeys((*own, *provided(seam))),)


def written_by_addons() -> list[str]:
    """What add-ons write in the directories of runs."""
    return [name for addon in installed().values() for name in addon.writes]


def begins_values(name: str) -> bool:
    """Whether a name that an add-on provides has all values that begin so, as ``http://`` has."""
    return name.endswith((":", "/"))


def load(path: str) -> Any:
    """The object ``module:object`` of an add-on."""
    return pkgutil.resolve_name(path)


def verbs() -> list[str]:
    """Verbs of add-ons, those of the package's that are not installed too."""
    of_addons = (verb for addon in installed().values() for verb in addon.verbs)
    return [*dict.fromkeys((*_OWN_VERBS, *of_addons))]


def verb_path(verb: str) -> str:
    """``module:function`` of an add-on's verb.

    Raises:
        ValueError: if the add-on, or one that it needs, is not installed.
    """
    return _path_of(verb, "verbs", f"dschat-lora {verb}")


def summary_of(verb: str) -> str:
    """What a verb of the package or an add-on does, in a line."""
    if verb in VERBS:
        return VERBS[verb]
    return next(a.summaries[verb] for a in installed().values() if verb in a.summaries)


def function_path(name: str) -> str:
    """The same of a name that add-ons have in ``dschat_lora``."""
    return _path_of(name, "functions", f"dschat_lora.{name}")


def addon_options(command: str, beside: Mapping[str, Any] | None = None, *bases: type) -> type[Any]:
    """A dataclass with a group for each add-on that has options of a stage or a verb.

    ``beside`` is the body of the class that gets them, and ``bases`` what it derives from: their
    options have the names that no option of another package may have.
    """
    groups: list[tuple[str, type[Any], Any]] = []
    for name, addon in installed().items():
        if path := addon.options.get(command):
            with left_out(name):
                options, is_own = load(path), name in ADDONS
                if not is_own:
                    _check_options(name, options, beside or {}, bases)
                own_group = group(options, flat=is_own, section=f"add-on {name}")
                groups.append((name, options, own_group))
    return make_dataclass("AddonOptions", groups, frozen=True)


def check_needs(addon: Addon, shown: str) -> None:
    """Refuse what ``shown`` names where an add-on that it needs is not installed.

    Raises:
        ValueError: naming that add-on.
    """
    for each in addon.needs:
        if each not in installed():
            raise ValueError(f"{shown} needs the add-on {each}, which is not installed")


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Go on, with one warning, where the block fails by another package's add-on."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if name in ADDONS:
            raise
        told = os.environ.get(_LEFT_OUT, "").split(os.pathsep)
        if name not in told and os.environ.get("RANK", "0") == "0":
            os.environ[_LEFT_OUT] = os.pathsep.join([*filter(None, told), name])
            why = " ".join(str(error).split())
            if not why or isinstance(error, KeyError | SystemExit):
                why = f"{type(error).__name__} {why}".strip()
            text = f"the add-on {name} cannot be loaded and is skipped: {why}"
            # Of the folder, which has no line of code to be shown.
            warnings.warn_explicit(text, UserWarning, str(Path(__file__).parent), 1)


def groups_of(config: object, method: str) -> Iterator[Any]:
    """The options of add-ons in a config whose class has a method of this name."""
    addons = vars(config)["addons"]
    for each in fields(addons):
        if hasattr(own := getattr(addons, each.name), method):
            yield own


def through_addons(config: ConfigT, method: str) -> ConfigT:
    """The config as this method of add-ons' options makes it in turn; None leaves it as it is."""
    for own in groups_of(config, method):
        config = getattr(own, method)(config) or config
    return config


def owners(config: object) -> dict[str, str]:
    """The add-on of each option of a config that is of one."""
    return {
        nested_prefix("", each) + name: each.name
        for each in (fields(vars(config)["addons"]) if hasattr(config, "addons") else ())
        for name in option_names(each.metadata["group"])
    }


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


def _new_addon(addon: object, others: Mapping[str, Addon]) -> Addon:
    """What another package's entry point names, if it can be used beside the ``others``.

    Raises:
        TypeError: if it is none.
        ValueError: if it has a name that something else has, or lacks an add-on that it needs.
    """
    if not isinstance(addon, Addon):
        raise TypeError(f"its entry point is a {type(addon).__name__}, not an Addon")
    if addon.functions:
        raise ValueError("it has functions, which must be imported from its own package")
    if lacking := [name for name in addon.needs if name not in others]:
        raise ValueError(f"it needs the add-on {lacking[0]}, which is not installed")
    _check_new("name", [addon.name], {"the package": ADDONS, "another add-on": others})
    own = (*VERBS, *_OWN_VERBS)
    them = {f"the add-on {each.name}": each for each in others.values()}
    _check_new("verb", addon.verbs, {"the package": own, **{n: a.verbs for n, a in them.items()}})
    for seam, names in addon.provides.items():
        taken = {name: other.provides.get(seam, {}) for name, other in them.items()}
        _check_new(f"name under {seam}", names, taken)
    return addon


def _check_options(
    name: str, options: object, beside: Mapping[str, Any], bases: tuple[type, ...]
) -> None:
    """Refuse another package's options that no command line can have.

    Raises:
        TypeError: if they are no dataclass of options.
        ValueError: if one is required, or has a name that another option has.
    """
    if not (isinstance(options, type) and is_dataclass(options)):
        raise TypeError(f"its options are a {type(options).__name__}, not a dataclass")
    for each in fields(options):
        if not each.metadata:
            raise TypeError(f"its {options.__name__}.{each.name} is not an option(...)")
    parse_config(options, [], program=name)
    own: type[Any] = dataclass(frozen=True)(type("Own", bases, dict(beside)))
    names = [f"{name}_{each}" for each in option_names(options)]
    _check_new("option", names, {"the package": option_names(own)})


def _check_new(kind: str, names: Collection[str], taken: Mapping[str, Collection[str]]) -> None:
    """Refuse names that are ``taken``, by whom.

    Raises:
        ValueError: naming the first that is.
    """
    for owner, theirs in taken.items():
        for name in names:
            if name in theirs:
                raise ValueError(f"{owner} has the {kind} {name}, too")
