"""Objects of a Python program that options name: rows of data, functions of the user's."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# An option's value that begins so is the name of an object, and of no file.
PREFIX = "python:"
_IN_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_objects: dict[str, object] = {}


@contextmanager
def held(value: object, name: str) -> Iterator[str]:
    """Inside the block an option may name ``value``; gives what it is called there."""
    called, number = f"{PREFIX}{name}", 2
    while called in _objects:
        called, number = f"{PREFIX}{name}_{number}", number + 1
    _objects[called] = value
    try:
        yield called
    finally:
        del _objects[called]


def is_held(name: str) -> bool:
    """Whether an option's value is the name of an object."""
    return name.startswith(PREFIX)


def rows_in_words(name: str) -> str:
    """A source of data as a log names it."""
    return "your rows" if is_held(name) else name


def is_in_module(name: str) -> bool:
    """Whether an option's value is ``module:object``."""
    return bool(_IN_MODULE.fullmatch(name))


def held_object(name: str, option: str) -> object:
    """The object behind a name.

    Raises:
        ValueError: naming the ``option``, if the program that had it has ended or let it go.
    """
    if name not in _objects:
        raise ValueError(
            f"--{option} {name} is an object of a Python program: give it again in Python, or "
            "name a file"
        )
    return _objects[name]
