"""Conversion of option values from a command line and from YAML, by a field's annotation."""

import argparse
import math
import re
import types
import typing
from collections.abc import Callable

from dschat_lora.config.files import parse_json

Scalar = int | float | str
# Sizes of numbers that are well within fp32: models are computed in it, or in less.
SIZES = (1e-30, 1e30)
# A value of --target_modules: linear layers of a composite model beside its text model.
ALL_BESIDE = "all-beside"
ROPE_TYPES = ("linear", "yarn", "llama3")  # by which a token's position alone decides
MAX_ROPE_FACTOR = 10_000


def converter(
    kind: type, choices: tuple[Scalar, ...] = (), *, words: tuple[str, ...] = (), hint: str = ""
) -> Callable[[str], Scalar]:
    """The conversion of one argument; its error names what is allowed, and ends with ``hint``.

    ``words`` may stand for a number.
    """
    wanted = {int: "a whole number", float: "a number"}.get(kind, "some text, in UTF-8")
    allowed = "one of " + ", ".join(map(str, choices)) if choices else wanted
    allowed = " or ".join([allowed, *words])

    def convert(text: str) -> Scalar:
        if text in words:
            return text
        try:
            value: Scalar | None = kind(text)
        except ValueError:
            value = None
        if isinstance(value, float) and math.isfinite(value) and not fits_fp32(value):
            sizes = " to ".join(f"{size:g}" for size in SIZES)
            raise argparse.ArgumentTypeError(f"must be 0 or of a size from {sizes}, got {text!r}")
        finite = not isinstance(value, float) or math.isfinite(value)
        # An empty one is a variable of a shell that is not set; a surrogate, no UTF-8 was typed.
        usable = kind is not str or (text and not re.search("[\0\ud800-\udfff]", text))
        if value is None or not (finite and usable) or (choices and value not in choices):
            more = f"; {hint}" if hint else ""
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r:.200}{more}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise argparse.ArgumentTypeError(f"must be in [-2**63, 2**63), got {text!r:.200}")
        return value

    return convert


def fits_fp32(number: float) -> bool:
    """Whether a number is 0 or well within fp32, which makes others 0 or an infinity."""
    smallest, largest = SIZES
    return number == 0 or smallest <= abs(number) <= largest


def value_shape(annotation: object) -> tuple[type, tuple[Scalar, ...], bool]:
    """(element type, allowed values, takes several) of a field's annotation."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        kinds = [a for a in typing.get_args(annotation) if a is not type(None)]
        (annotation,) = [a for a in kinds if a in (int, float)] or kinds
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices, False
    if typing.get_origin(annotation) is tuple:
        element, choices, _ = value_shape(typing.get_args(annotation)[0])
        return element, choices, True
    assert isinstance(annotation, type), annotation
    return annotation, (), False


def number_words(annotation: object) -> tuple[str, ...]:
    """Words that may be typed for a number: of ``float | Literal["auto"]``, auto."""
    kinds = typing.get_args(annotation)
    if not any(kind in (int, float) for kind in kinds):
        return ()
    literals = [a for a in kinds if typing.get_origin(a) is typing.Literal]
    return tuple(word for each in literals for word in typing.get_args(each))


def is_switch(annotation: object) -> bool:
    """Whether a field is a bool, or a bool with further words: ``bool | Literal["auto"]``."""
    return annotation is bool or bool in typing.get_args(annotation)


def switch_words(annotation: object) -> list[str]:
    """Values that may be typed for a switch: on, off, and words such as auto."""
    others = [arg for arg in typing.get_args(annotation) if arg is not bool]
    return ["on", "off", *(word for other in others for word in typing.get_args(other))]


def from_yaml(label: str, value: object, annotation: object, *, hint: str = "") -> object:
    """A value of a YAML file, converted as if typed on the command line.

    Raises:
        ValueError: if it is of another kind; ``label`` begins the message, ``hint`` ends it.
    """
    more = f"; {hint}" if hint else ""
    if is_switch(annotation):
        on, off, *words = switch_words(annotation)
        if words and value in (on, off):  # in quotes, as they are typed
            return value == on
        if not isinstance(value, bool) and value not in words:
            allowed = " or ".join(["true or false", *words])
            raise ValueError(f"{label} must be {allowed}, got {value!r}{more}")
        return value
    kind, choices, many = value_shape(annotation)
    convert = converter(kind, choices, words=number_words(annotation), hint=hint)
    items = value if many and isinstance(value, list) else [value]
    if value is None and type(None) in typing.get_args(annotation):
        return None
    if kind is str and any(item is None or isinstance(item, bool | list | dict) for item in items):
        raise ValueError(
            f"{label} must be text{' or a list of texts' if many else ''}, got {value!r}{more}"
        )
    try:
        converted = tuple(convert(str(item)) for item in items)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{label} {error}") from error
    return converted if many else converted[0]


def parse_rope_scaling(text: str | None) -> dict[str, object]:
    """What ``--rope_scaling`` says, empty where it is None.

    Raises:
        ValueError: unless it is a JSON object with a type and a factor. In other types of
            transformers the rotation of a token depends on the longest row of its batch.
    """
    if text is None:
        return {}
    reason = ""
    try:
        fields = parse_json(text)
    except ValueError as error:
        fields, reason = None, f" ({error})"
    if isinstance(fields, dict):
        factor = fields.get("factor", 0)
        fits = type(factor) in (int, float) and 1 <= factor <= MAX_ROPE_FACTOR
        if fits and fields.get("rope_type") in ROPE_TYPES:
            return fields
    raise ValueError(
        """--rope_scaling must be a JSON object such as '{"rope_type": "yarn", "factor": 4.0}', """
        f"of rope_type {', '.join(ROPE_TYPES)} and a factor in [1, {MAX_ROPE_FACTOR}], "
        f"got {text:.200}{reason}"
    )
