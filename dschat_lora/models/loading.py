"""Errors of loading a model's files, in one line of the user's terms."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from transformers.utils import logging


def check_whole(lacking: Iterable[str], *, new: Collection[str] = ()) -> None:
    """Refuse a model whose files are ``lacking`` weights, but for ``new`` ones.

    Raises:
        ValueError: naming the first few.
    """
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
