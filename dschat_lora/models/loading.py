"""Errors of loading a model's files, in one line of the user's terms."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from dschat_lora.algos.finite import check_finite
from dschat_lora.checkpoint.manifest import WEIGHTS_INDEX, weight_map

MOST_PARTS = 10_000  # layers or labels; no model has more
_COUNTS = re.compile(r"(n|num)_(\w+_)?(layers?|labels)")


def check_loaded(model: nn.Module, lacking: Collection[str], *, new: Collection[str] = ()) -> None:
    """Refuse files that are ``lacking`` weights, but for ``new`` ones, or hold NaN or infinities.

    Those may not show in what a model computes: torch's attention on a CPU hides NaN.

    Raises:
        ValueError: naming the first few.
    """
    check_whole(lacking, new=new)
    for name, parameter in model.named_parameters():
        if name not in lacking:
            check_finite(parameter, name)


def check_whole(lacking: Collection[str], *, new: Collection[str] = ()) -> None:
    """The part of :func:`check_loaded` about weights that are not there."""
    missing = sorted(set(lacking) - set(new))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"the files lack {', '.join(missing[:3])}{more}")


def check_local_files(path: str, fields: Mapping[str, Any]) -> None:
    """Refuse what transformers would read elsewhere, wait for, or build for hours.

    ``fields`` are those of ``config.json``, ``path`` is a directory or a hub name.

    Raises:
        ValueError: naming the field or the file.
    """
    waiting: list[Any] = [fields]
    while waiting:
        part = waiting.pop()
        waiting += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            counted = _COUNTS.fullmatch(str(name)) is not None and type(value) is int
            if counted and not 0 <= value <= MOST_PARTS:
                raise ValueError(f"{name} of config.json must be 0 to {MOST_PARTS:,}, got {value}")
    index = Path(path) / WEIGHTS_INDEX
    if index.is_file():
        weight_map(index)


@contextmanager
def hub_errors(option: str, name: str, what: str) -> Iterator[None]:
    """Turn a failure to find or read ``name`` into a ValueError that names the option."""
    try:
        yield
    except Exception as error:
        # Of a damaged file libraries raise whatever its content leads them to, plain Exception
        # and AssertionError too.
        if type(error).__name__ == "OutOfMemoryError":  # of a GPU
            raise
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if "ignore_mismatched_sizes" in reason:
            reason = "its config.json describes weights of other shapes than its files hold"
        raise ValueError(f"{option} {name}: its {what} cannot be loaded: {reason}") from error


@contextmanager
def only_errors() -> Iterator[None]:
    """Inside the block transformers does not log what is unusual about a model."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
