"""Frozen dataclasses to one command line and back.

A stage declares its options as a dataclass of groups: a field made with ``group(LoraConfig)``
yields ``--lora_dim``; with ``flat=False`` and the name ``actor`` it yields ``--actor_lora_dim``.
"""

import copy
import dataclasses
import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dschat_lora.config.bundled import find_recipe
from dschat_lora.config.files import MOST_TYPED_BYTES, parse_yaml, read_text
from dschat_lora.config.parser import (
    COMPATIBILITY,
    OTHER,
    Parser,
    by_section,
    everyday_options,
    unknown_option,
)
from dschat_lora.config.values import converter, from_yaml, is_switch, value_shape

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class StageOptions(DataclassInstance, Protocol):
        """Options that know which of them the user set."""

        @property
        def given(self) -> frozenset[str]: ...


ConfigT = TypeVar("ConfigT", bound="DataclassInstance")
ValueT = TypeVar("ValueT")
PartT = TypeVar("PartT", bound=Any)
OptionField = tuple[dataclasses.Field[object], object]  # and its annotation
# When an option has an effect: a condition, or a function of values by name that gives the message
# where it has none, as :func:`dschat_lora.config.when.no_effect` makes it, and else nothing.
When = str | Callable[[Callable[[str], Any]], str]
NEVER, ELSEWHERE = "never", "elsewhere"

# Arguments of Python's functions by the options that they are on the command line.
_ARGUMENTS = {
    "model_name_or_path": "model",
    "actor_model_name_or_path": "model",
    "critic_model_name_or_path": "critic",
    "data_path": "data",
    "eval_data_path": "eval_data",
    "reward_function": "rewards",
    "resume_from_checkpoint": "resume",
}
# Set by launchers; DeepSpeed's own names that carry no setting of ours.
_LAUNCHER_FLAGS = ("local_rank", "deepscale", "deepscale_config")


def option(
    default: ValueT = dataclasses.MISSING,  # type: ignore[assignment]
    *,
    help: str,
    section: str | None = None,
    hint: str = "",
    settled: str = "",
    when: When = "",
    names: Sequence[str] = (),
    runs: str = "",
    replaces: Sequence[str] = (),
) -> ValueT:
    """A dataclass field with a help line; every command-line option has one.

    The first line of ``help`` says of an everyday option what a newcomer needs, further lines what
    ``--help all`` adds. The help shows it in ``section``, or in that of its class. ``hint`` follows
    the message about a value that is not allowed. ``settled`` says in words what other things make
    of the default, which the help then shows in its place, unless a stage has a default of its own;
    ``{name}`` in it is the stage's default of a field of the same class, and always shown.
    ``names`` are values that the help of a command lists, where others are allowed too.
    ``runs`` is what a checkpoint, which may be somebody else's, does not choose: "code" of a
    command or the like, "object" of the name of a user's object, which Python may give itself,
    "part" of the name of a part of the package or of such an object, and "file" of a path outside
    of the run that is written to. Where the option is typed, a checkpoint does not choose those
    that it ``replaces`` either.

    ``when`` is the condition under which the option has an effect; where it does not hold a run
    says so (:func:`dschat_lora.config.when.without_effect`). It is one term, or several with
    `` or `` between: ``lora_dim`` (is on, that is neither 0, false, absent nor "none"),
    ``algorithm=ppo,grpo`` (is one of these), ``tensor_parallel_size>1``, each
    perhaps after ``not ``. A name is that of an option, with or without the prefix of the group,
    or a property such as ``has_critic``, which a message calls "a critic". ``NEVER`` is of options
    that no stage uses, ``ELSEWHERE`` of those that other stages use. The class variable ``when`` of
    a stage holds conditions by name, which take the place of these.
    """
    about: dict[str, object] = {"help": help, "section": section, "hint": hint}
    about |= {"settled": settled, "when": when, "names": tuple(names), "runs": runs}
    about["replaces"] = tuple(replaces)
    field: ValueT = dataclasses.field(default=default, metadata=about)
    return field


def classic(default: ValueT, *, help: str, hint: str = "", when: When = "") -> ValueT:
    """An option that is there for compatibility, which the help shows last."""
    return option(default, help=help, section=COMPATIBILITY, hint=hint, when=when)


def accepted(default: ValueT, why: str) -> ValueT:
    """An option of DeepSpeed-Chat that needs nothing here; its help ends by saying ``why``."""
    return classic(default, help=f"accepted from DeepSpeed-Chat{why}", when=NEVER)


def group(
    config_class: type[ConfigT],
    *,
    flat: bool = True,
    section: str = "",
    when: When = "",
    **defaults: object,
) -> ConfigT:
    """A nested config, whose own defaults ``defaults`` replace in this stage.

    The help shows it in ``section``, or where its class says. ``when`` is a condition of all its
    options, besides their own.
    """
    metadata = {"group": config_class, "flat": flat, "in": section, "defaults": defaults}
    field: ConfigT = dataclasses.field(
        default_factory=functools.partial(config_class, **defaults),
        metadata={**metadata, "when": when},
    )
    return field


def given_options() -> frozenset[str]:
    """A field that receives the names of the options the user set."""
    field: frozenset[str] = dataclasses.field(default=frozenset(), metadata={"given": True})
    return field


def hidden(default: ValueT) -> ValueT:
    """A field that is no option: the code sets it, not the user."""
    field: ValueT = dataclasses.field(default=default, metadata={"hidden": True})
    return field


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    program: str | None = None,
    examples: str | None = None,
    positionals: Sequence[str] = (),
    read_file: Callable[[str], Mapping[str, object]] | None = None,
    as_script: bool = False,
) -> ConfigT:
    """An instance of ``config_class`` from ``argv`` (default: ``sys.argv[1:]``).

    A YAML file given with ``--config`` sets the same fields; the command line wins. ``read_file``
    gives the values that it has, where they are not simply its lines. Words that belong to no
    option are the values of ``positionals`` in turn, the last of which takes several if it can.
    ``examples`` are lines that the help begins with. ``everyday`` of the class are the options that
    ``--help`` shows before those of ``EVERYDAY``; of a class without it, all are shown. The help of
    a script shows defaults as the class has them, that of a command those that are ``settled``.

    Raises:
        ValueError: naming an option that is unknown, or its value and what is allowed.
    """
    fields, aliases = dict(option_fields(config_class)), option_aliases(config_class)
    if as_script:
        fields |= _settled_by_class(config_class)
    parser = Parser(program or Path(sys.argv[0]).name, description, examples)
    sections = {name: field.metadata["section"] for name, (field, _) in fields.items()}
    everyday = getattr(config_class, "everyday", None)
    if everyday is not None:
        parser.everyday = {*everyday_options(fields, everyday), "h", "config"}
    for title, names in by_section(sections, everyday or ()).items():
        for name in names:
            also = [old for old, new in aliases.items() if new == name]
            parser.add_option(title, [name, *also], *fields[name])
    about = "YAML file of options, or the name of a recipe"
    parser.add_argument("--config", action="once", metavar="FILE", help=about)
    for name in _LAUNCHER_FLAGS:
        parser.add_argument(f"--{name}", nargs="?", help=SUPPRESS)
    namespace, unknown = parser.parse_known_args(argv)
    if positionals and not any(word.startswith("-") for word in unknown):
        given = {name for name in positionals if hasattr(namespace, name)}
        taken, unknown = _by_position(unknown, positionals, fields, given)
        vars(namespace).update(taken)
    if unknown:
        switches = [f"no-{name}" for name, (_, kind) in fields.items() if is_switch(kind)]
        known = [*fields, *aliases, "config", *switches]
        named = [word for word in unknown if re.match(r"-+[a-zA-Z]", word)] or unknown[:1]
        raise ValueError("; ".join(unknown_option(word, known) for word in dict.fromkeys(named)))
    values = {k: v for k, v in vars(namespace).items() if k in fields}
    if namespace.config is not None:
        if read_file is None:
            label = f"--config {namespace.config}"
            content = read_mapping(namespace.config, label=label)
            values = options_of(config_class, content, label=label) | values
        else:
            values = {**read_file(namespace.config), **values}
    return build_config(config_class, values)


def _settled_by_class(config_class: "type[DataclassInstance]") -> dict[str, OptionField]:
    """The options that are ``settled``, whose help shows the default of the class instead."""
    own, fields = flatten(build_config(config_class, {})), dict[str, OptionField]()
    for name, (option, annotation) in option_fields(config_class).items():
        if option.metadata["settled"]:
            field, default = copy.copy(option), f"; default: {own[name]}"
            about = re.sub("; default: .*", default, option.metadata["help"], count=1)
            field.metadata = types.MappingProxyType({**option.metadata, "help": about})
            fields[name] = field, annotation
    return fields


def _by_position(
    words: Sequence[str],
    positionals: Sequence[str],
    fields: Mapping[str, OptionField],
    given: Collection[str],
) -> tuple[dict[str, object], list[str]]:
    """Values by option of words that belong to none, and the words that are left over."""
    values: dict[str, object] = {}
    left = list(words)
    for name in positionals:
        if not left or name in given:
            continue
        kind, choices, many = value_shape(fields[name][1])
        taken, left = (left, []) if many else (left[:1], left[1:])
        try:
            converted = [converter(kind, choices)(word) for word in taken]
        except ArgumentTypeError as error:
            raise ValueError(f"--{name} {error}") from error
        values[name] = converted if many else converted[0]
    return values, left


def build_config(
    config_class: type[ConfigT], values: Mapping[str, object], prefix: str = ""
) -> ConfigT:
    """An instance from ``{option name: value}``, as if these and no others were typed.

    Names begin with ``prefix``, that of a nested group.
    """
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = prefix + field.name
        if nested := field.metadata.get("group"):
            own = nested_prefix(prefix, field)
            defaults = {own + key: value for key, value in field.metadata["defaults"].items()}
            kwargs[field.name] = build_config(nested, {**defaults, **values}, own)
        elif "given" in field.metadata:
            kwargs[field.name] = frozenset(values)
        elif name in values:
            value = values[name]
            kwargs[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is dataclasses.MISSING and "hidden" not in field.metadata:
            raise ValueError(f"--{name} is required")
    return config_class(**kwargs)


def typed_options(config: "StageOptions") -> dict[str, Any]:
    """The options the user set, JSON-ready; :func:`build_config` takes them back."""
    return {name: value for name, value in flatten(config).items() if name in config.given}


def read_mapping(path: str, *, label: str) -> dict[str, Any]:
    """The content of a YAML file of ``name: value`` lines, by its path or a recipe's name.

    Raises:
        ValueError: if it cannot be read or holds something else; ``label`` begins the message.
    """
    file = find_recipe(path, label=label)
    try:
        content = parse_yaml(read_text(file, most=MOST_TYPED_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"{label} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{label} must hold 'option: value' lines")
    return content


def options_of(
    config_class: "type[DataclassInstance]", content: Mapping[Any, Any], *, label: str
) -> dict[str, Any]:
    """Values of a YAML file, checked one by one and converted as if typed on the command line.

    Options that are gone are left out where they did nothing.

    Raises:
        ValueError: at the first that is unknown or of another kind. ``label`` begins the message.
    """
    fields, aliases = option_fields(config_class), option_aliases(config_class)
    values = {}
    for given, value in content.items():
        name = aliases.get(given, given)
        if name not in fields:
            from dschat_lora.config.other_names import GONE, dotted_name

            if given in GONE and (value == GONE[given] or str(value) == str(GONE[given])):
                continue
            typed = f"--{dotted_name(name, value)}"
            raise ValueError(f"{label}: {unknown_option(typed, [*fields])}")
        if name in values:
            raise ValueError(f"{label}: {given} and another name of --{name}; give one")
        field, annotation = fields[name]
        hint = field.metadata.get("hint", "")
        values[name] = from_yaml(f"{label}: {name}", value, annotation, hint=hint)
    return values


def options_in_python(
    config_class: "type[DataclassInstance]", values: Mapping[str, object]
) -> dict[str, Any]:
    """Values that a Python program gives, checked and converted as if typed on the command line.

    None is as good as not given. A mapping is the text of its JSON, and for ``columns`` its items.

    Raises:
        TypeError: at a name that is no option's.
        ValueError: at a value that is not allowed. Both messages are the command line's.
    """
    fields, aliases = option_fields(config_class), option_aliases(config_class)
    converted = {}
    for given, value in values.items():
        name = aliases.get(given, given)
        if name not in fields:
            raise TypeError(unknown_in_python(given, [*fields, *aliases]))
        if value is None:
            continue
        field, annotation = fields[name]
        many = not is_switch(annotation) and value_shape(annotation)[2]
        if isinstance(value, Mapping):
            pairs = [f"{key}={item}" for key, item in value.items()]
            try:
                value = pairs if many else json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"--{name}: is not JSON: {error}") from error
        elif isinstance(value, set | frozenset) and many:
            value = sorted(value)
        elif type(value).__module__ == "numpy":
            value = value.tolist()  # type: ignore[attr-defined]
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif isinstance(value, tuple | list) and many:
            value = [os.fspath(v) if isinstance(v, os.PathLike) else v for v in value]
        hint = field.metadata.get("hint", "")
        converted[name] = from_yaml(f"--{name}:", value, annotation, hint=hint)
    return converted


def unknown_in_python(name: str, known: Collection[str]) -> str:
    """The message about an argument of none of the ``known`` names."""
    if name in ("rewards", "critic"):
        return f"{name} is an argument of dl.rlhf"
    here = [argument for option, argument in _ARGUMENTS.items() if option in known]
    message = unknown_option(f"--{name}", known)
    if "see --help" in message and (close := difflib.get_close_matches(name, here, 1)):
        return message.replace("see --help", f"did you mean {close[0]}?")
    for option, argument in _ARGUMENTS.items():
        message = re.sub(rf"--{option}\b", argument, message)
    return message.replace("see --help", "see help() of the function")


def option_names(config_class: "type[DataclassInstance]") -> list[str]:
    """Every option of the class."""
    return [*option_fields(config_class)]


def options_that_run(config_class: "type[DataclassInstance]", *kinds: str) -> list[str]:
    """Options of the class that say so of themselves; see :func:`option`."""
    fields = option_fields(config_class)
    return [name for name, (field, _) in fields.items() if field.metadata["runs"] in kinds]


def option_aliases(config_class: type) -> Mapping[str, str]:
    """Further names of the class's options, such as an original's: its ``spellings``."""
    spellings: Mapping[str, str] = getattr(config_class, "spellings", {})
    return spellings


def command_line(values: Mapping[str, object]) -> list[str]:
    """The arguments that set ``{option name: value}`` on a command line; None is left out."""
    argv: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list | tuple):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            text = str(value)
            argv += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return argv


def chosen_verb(argv: Sequence[str], verbs: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that a command line begins with, the first of ``verbs`` where it has none.

    Arguments that a launcher puts in front of it are kept.
    """
    launched = tuple(f"--{name}" for name in _LAUNCHER_FLAGS)
    start = next((i for i, text in enumerate(argv) if not text.startswith(launched)), len(argv))
    if argv[start : start + 1] and argv[start] in verbs:
        return argv[start], [*argv[:start], *argv[start + 1 :]]
    return verbs[0], list(argv)


def value_text(value: object) -> str:
    """A JSON-ready value as a user reads it in a message."""
    if value is None or value == []:
        return "the default"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def flatten(config: "DataclassInstance", prefix: str = "") -> dict[str, Any]:
    """The config as ``{option name: value}``, JSON-ready."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "group" in field.metadata:
            flat |= flatten(value, nested_prefix(prefix, field))
        elif _is_option(field):
            flat[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return flat


@functools.cache
def option_fields(config_class: "type[DataclassInstance]") -> Mapping[str, OptionField]:
    """Field and annotation of every option by its name, as they are in this stage.

    Its default and section are the stage's, ``when`` its own condition after those of its groups.
    """
    return types.MappingProxyType(dict(_fields_of_group(config_class, "", {}, "", ())))


def _fields_of_group(
    config_class: "type[DataclassInstance]",
    prefix: str,
    defaults: Mapping[str, object],
    section: str,
    when: tuple[When, ...],
) -> Iterator[tuple[str, OptionField]]:
    annotations = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if nested := field.metadata.get("group"):
            inner, within = nested_prefix(prefix, field), field.metadata["in"] or section
            conditions, own_defaults = (*when, field.metadata["when"]), field.metadata["defaults"]
            yield from _fields_of_group(nested, inner, own_defaults, within, conditions)
        elif _is_option(field):
            own = copy.copy(field)
            about, settled = field.metadata["help"], field.metadata["settled"]
            is_settled = "{" in settled or (settled and field.name not in defaults)
            own.default = None if is_settled else defaults.get(field.name, field.default)
            if is_settled:
                settled = settled.format_map(
                    {**{f.name: f.default for f in dataclasses.fields(config_class)}, **defaults}
                )
                about = re.sub(r"$", f"; default: {settled}", about, count=1, flags=re.MULTILINE)
            shown = field.metadata["section"] or section or getattr(config_class, "section", OTHER)
            here = {"help": about, "section": shown, "prefix": prefix}
            here["when"] = (*when, field.metadata["when"])
            own.metadata = types.MappingProxyType({**field.metadata, **here})
            yield prefix + field.name, (own, annotations[field.name])


def _is_option(field: dataclasses.Field[object]) -> bool:
    return not {"given", "hidden"} & field.metadata.keys()


def with_values(config: PartT, values: Mapping[str, Any], prefix: str = "") -> PartT:
    """The config, or a group of it, with other values of options by their names."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        now, name = getattr(config, field.name), prefix + field.name
        if "group" in field.metadata:
            new = with_values(now, values, nested_prefix(prefix, field))
            changed |= {} if new is now else {field.name: new}
        elif name in values and values[name] != now:
            changed[field.name] = values[name]
    return dataclasses.replace(config, **changed) if changed else config


def nested_prefix(prefix: str, field: dataclasses.Field[object]) -> str:
    return prefix if field.metadata["flat"] else f"{prefix}{field.name}_"
