"""Functions of the user, named as ``module:function``, found without importing anything."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def check_function(option: str, name: str) -> None:
    """Refuse a function whose module cannot be found, without importing it.

    Raises:
        ValueError: naming the option.
    """
    module = name.partition(":")[0]
    with working_directory():
        try:
            found = importlib.util.find_spec(module.partition(".")[0])
        except (ImportError, ValueError):
            found = None
    if found is None:
        raise ValueError(
            f"--{option} {name}: there is no module {module} in the working directory or among "
            "the installed packages"
        )


@contextmanager
def working_directory() -> Iterator[None]:
    """Let modules beside the user be found, as ``python -m`` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
