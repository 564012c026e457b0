"""Frozen dataclasses to one command line and back; the only argparse of the package.

A stage declares what it needs as a dataclass of groups. Nested groups flatten: a field made
with ``group(LoraConfig)`` yields ``--lora_dim``; with ``flat=False`` and the name ``actor`` it
yields ``--actor_lora_dim``. A YAML file given with ``--config`` sets the same fields; the
command line wins.
"""

import argparse
import copy
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ConfigT = TypeVar("ConfigT")

# Set by launchers; DeepSpeed's own names that carry no setting of ours.
_LAUNCHER_FLAGS = ("local_rank", "deepscale", "deepscale_config")


def option(default: Any = dataclasses.MISSING, *, help: str) -> Any:
    """A dataclass field with a help line; every command-line option has one."""
    return dataclasses.field(default=default, metadata={"help": help})


def group(config_class: type, *, flat: bool = True, **defaults: Any) -> Any:
    """A nested config; ``flat=False`` prefixes its options with the field's name.

    ``defaults`` stand in for the class's own: what suits one stage need not suit another.
    """
    return dataclasses.field(
        default_factory=functools.partial(config_class, **defaults),
        metadata={"group": config_class, "flat": flat, "defaults": defaults},
    )


def given_options() -> Any:
    """A field that receives the names of the options the user set, as a frozenset."""
    return dataclasses.field(default=frozenset(), metadata={"given": True})


def hidden(default: Any = None) -> Any:
    """A field that is no option: what a check has settled, for the code behind it."""
    return dataclasses.field(default=default, metadata={"hidden": True})


class Parser(argparse.ArgumentParser):
    """Raises instead of printing usage, so that every mistake is one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # By default -1e-4 is taken for an option.
        self._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument ", "", 1))


def parse_config(
    config_class: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    program: str | None = None,
) -> ConfigT:
    """An instance of ``config_class`` from ``argv`` (default: ``sys.argv[1:]``).

    Raises:
        ValueError: on an unknown option or an unusable value; the message names the option,
            the value and what is allowed.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    fields = dict(_leaves(config_class))
    program = program or Path(sys.argv[0]).name
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file of these options")
    for name in _LAUNCHER_FLAGS:
        parser.add_argument(f"--{name}", nargs="?", help=argparse.SUPPRESS)
    for name, (field, annotation) in fields.items():
        also = [old for old, new in option_aliases(config_class).items() if new == name]
        _add_option(parser, [name, *also], field, annotation)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        switches = [f"no-{name}" for name, (_, kind) in fields.items() if _is_switch(kind)]
        known = [*fields, *option_aliases(config_class), "config", *switches]
        raise ValueError(unknown_option(unknown[0], known))
    values = {k: v for k, v in vars(namespace).items() if k in fields}
    if namespace.config is not None:
        label = f"--config {namespace.config}"
        content = read_mapping(namespace.config, label=label)
        values = options_of(config_class, content, label=label) | values
    return build_config(config_class, values)


def build_config(config_class: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """An instance from ``{option name: value}``, as if these and no others were typed.

    Raises:
        ValueError: on an unusable value.
    """
    return _build(config_class, values, prefix="")


def typed_options(config: Any) -> dict[str, Any]:
    """The options the user set, JSON-ready; :func:`build_config` takes them back."""
    return {name: value for name, value in flatten(config).items() if name in config.given}


def read_mapping(path: str, *, label: str) -> dict[str, Any]:
    """The content of a YAML file of ``name: value`` lines.

    Args:
        path: of the file.
        label: begins the message of an error.

    Raises:
        ValueError: if it cannot be read or holds something else.
    """
    import yaml  # only where a file is given

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{label} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{label} must hold 'option: value' lines")
    return content


def options_of(
    config_class: type, content: Mapping[Any, Any], *, label: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Values of a YAML file, checked one by one and converted as if typed on the command line.

    Args:
        config_class: whose options they are.
        content: by name.
        label: begins the message of an error.
        more: names that are no options of the class, and may have been meant.

    Raises:
        ValueError: at the first that is unknown or of another kind.
    """
    fields, spellings = dict(_leaves(config_class)), option_aliases(config_class)
    values = {}
    for given, value in content.items():
        name = spellings.get(given, given)
        if name not in fields:
            raise ValueError(f"{label}: {unknown_option(f'--{name}', [*fields, *more])}")
        if name in values:
            raise ValueError(f"{label}: {given} and another name of --{name}; give one")
        values[name] = _from_yaml(f"{label}: {name}", value, fields[name][1])
    return values


def option_names(config_class: type) -> list[str]:
    """Every option of the class."""
    return [name for name, _ in _leaves(config_class)]


def option_aliases(config_class: type) -> Mapping[str, str]:
    """Further names of the class's options, from its ``spellings``: of an original, say."""
    spellings: Mapping[str, str] = getattr(config_class, "spellings", {})
    return spellings


def command_line(values: Mapping[str, Any]) -> list[str]:
    """``{option name: value}`` as it would be typed; what is None is left out."""
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


def run_main(
    config_class: type[ConfigT],
    check: Callable[[ConfigT], ConfigT],
    main: Callable[[ConfigT], None],
    *,
    description: str | None = None,
    argv: Sequence[str] | None = None,
    program: str | None = None,
) -> None:
    """Parse, check, run; a user's mistake ends as one line on stderr and exit code 2.

    Args:
        config_class: dataclass of the stage's options.
        check: what can be found wrong before anything heavy is imported; returns the
            resolved config.
        main: the stage.
        description: first paragraphs of --help.
        argv: the options; default: all of ``sys.argv`` after the script.
        program: its name in --help; default: the script.
    """
    try:
        config = check(parse_config(config_class, argv, description=description, program=program))
    except (ValueError, OSError) as error:
        fail(str(error))
    main(config)


def chosen_verb(argv: Sequence[str], verbs: Sequence[str]) -> tuple[str, list[str]]:
    """The verb that a command line begins with, the first of ``verbs`` where it has none.

    Returns:
        ``(verb, the other arguments)``. What a launcher puts in front is passed over.
    """
    launched = tuple(f"--{name}" for name in _LAUNCHER_FLAGS)
    place = next((i for i, text in enumerate(argv) if not text.startswith(launched)), 0)
    if argv[place : place + 1] and argv[place] in verbs:
        return argv[place], [*argv[:place], *argv[place + 1 :]]
    return verbs[0], list(argv)


def fail(message: str, *, code: int = 2, from_any_rank: bool = False) -> NoReturn:
    """End the process with one line on stderr, from the first rank alone.

    Args:
        message: what went wrong, and what to do.
        code: exit code; 2 for a user's mistake.
        from_any_rank: for what may go wrong on one rank and not on the first.
    """
    if from_any_rank or os.environ.get("RANK", "0") == "0":
        sys.stderr.write("error: " + " ".join(message.split()) + "\n")
        sys.stderr.flush()
    raise SystemExit(code)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """The config as ``{option name: value}``, JSON-ready."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "group" in field.metadata:
            flat |= flatten(value, _nested_prefix(prefix, field))
        elif _is_option(field):
            flat[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return flat


def _leaves(
    config_class: type, prefix: str = "", defaults: Mapping[str, Any] = types.MappingProxyType({})
) -> Iterator[tuple[str, tuple[dataclasses.Field[Any], Any]]]:
    annotations = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if nested := field.metadata.get("group"):
            yield from _leaves(nested, _nested_prefix(prefix, field), field.metadata["defaults"])
        elif _is_option(field):
            shown = copy.copy(field)
            shown.default = defaults.get(field.name, field.default)
            yield prefix + field.name, (shown, annotations[field.name])


def _is_option(field: dataclasses.Field[Any]) -> bool:
    return not {"given", "hidden"} & field.metadata.keys()


def _add_option(
    parser: argparse.ArgumentParser,
    names: Sequence[str],
    field: dataclasses.Field[Any],
    annotation: Any,
) -> None:
    """Add an option under its name, which comes first, and its other spellings."""
    name, flags = names[0], [f"--{each}" for each in names]
    help_text = field.metadata["help"].replace("%", "%%")
    if field.default not in (None, (), False, dataclasses.MISSING):
        shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        help_text += f" (default: {shown})"
    kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
    if annotation is bool:
        parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **kwargs)
        return
    if _is_switch(annotation):
        words = _switch_words(annotation)
        kwargs |= {"type": _switch_converter(words), "metavar": "{" + ",".join(words) + "}"}
        parser.add_argument(*flags, nargs="?", const=True, **kwargs)
        kwargs = {"default": argparse.SUPPRESS, "help": f"same as --{name} off"}
        parser.add_argument(f"--no-{name}", dest=name, action="store_const", const=False, **kwargs)
        return
    kind, choices, many = _shape_of(annotation)
    if choices:
        kwargs["metavar"] = "{" + ",".join(map(str, choices)) + "}"
    else:
        kwargs["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
    if many:
        kwargs["nargs"] = "*"
    parser.add_argument(*flags, type=_converter(kind, choices), **kwargs)


def _shape_of(annotation: Any) -> tuple[type, tuple[Any, ...], bool]:
    """(element type, allowed values, takes several) of a field's annotation."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = [a for a in typing.get_args(annotation) if a is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices, False
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], (), True
    return annotation, (), False


def _is_switch(annotation: Any) -> bool:
    """Whether a field is on or off, or perhaps something else: ``bool | Literal["auto"]``."""
    return annotation is bool or bool in typing.get_args(annotation)


def _switch_words(annotation: Any) -> list[str]:
    """What may be typed for a switch: on, off, and the words for something else."""
    others = [arg for arg in typing.get_args(annotation) if arg is not bool]
    return ["on", "off", *(word for other in others for word in typing.get_args(other))]


def _switch_converter(words: Sequence[str]) -> Callable[[str], bool | str]:
    convert = _converter(str, tuple(words))
    return lambda text: {"on": True, "off": False}.get(word := convert(text), word)


def _converter(kind: type, choices: tuple[Any, ...]) -> Callable[[str], Any]:
    wanted = {int: "a whole number", float: "a number"}.get(kind, "text")
    allowed = "one of " + ", ".join(map(str, choices)) if choices else wanted

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        finite = not isinstance(value, float) or math.isfinite(value)
        if value is None or not finite or (choices and value not in choices):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")
        return value

    return convert


def unknown_option(text: str, names: Sequence[str]) -> str:
    """What to say of ``text``, which is none of ``names``."""
    if not text.startswith("-"):
        return f"unexpected argument {text!r}; options start with --"
    given = text.split("=")[0]
    names = [f"--{name}" for name in names]
    close = difflib.get_close_matches(given.replace("-", "_").replace("__", "--", 1), names, 1)
    return f"unknown option {given}" + (f"; did you mean {close[0]}?" if close else "; see --help")


def _from_yaml(label: str, value: Any, annotation: Any) -> Any:
    if _is_switch(annotation):
        on, off, *words = _switch_words(annotation)
        if words and value in (on, off):  # in quotes, as they are typed
            return value == on
        if not isinstance(value, bool) and value not in words:
            allowed = " or ".join(["true or false", *words])
            raise ValueError(f"{label} must be {allowed}, got {value!r}")
        return value
    kind, choices, many = _shape_of(annotation)
    convert = _converter(kind, choices)
    items = value if many and isinstance(value, list) else [value]
    if value is None and type(None) in typing.get_args(annotation):
        return None
    if kind is str and any(item is None or isinstance(item, bool | list | dict) for item in items):
        raise ValueError(
            f"{label} must be text{' or a list of texts' if many else ''}, got {value!r}"
        )
    try:
        converted = tuple(convert(str(item)) for item in items)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{label} {error}") from error
    return converted if many else converted[0]


def _build(config_class: type[ConfigT], values: Mapping[str, Any], prefix: str) -> ConfigT:
    kwargs: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):  # type: ignore[arg-type]
        name = prefix + field.name
        if nested := field.metadata.get("group"):
            own = _nested_prefix(prefix, field)
            defaults = {own + key: value for key, value in field.metadata["defaults"].items()}
            kwargs[field.name] = _build(nested, {**defaults, **values}, own)
        elif "given" in field.metadata:
            kwargs[field.name] = frozenset(values)
        elif name in values:
            value = values[name]
            kwargs[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is dataclasses.MISSING and "hidden" not in field.metadata:
            raise ValueError(f"--{name} is required")
    return config_class(**kwargs)


def _nested_prefix(prefix: str, field: dataclasses.Field[Any]) -> str:
    return prefix if field.metadata["flat"] else f"{prefix}{field.name}_"
