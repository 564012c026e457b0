"""Errors of loading a model's files, in one line of the user's terms."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from dschat_lora.algos.finite import check_finite


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


@contextmanager
def hub_errors(option: str, name: str, what: str) -> Iterator[None]:
    """Turn a failure to find or read ``name`` into a ValueError that names the option."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
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
