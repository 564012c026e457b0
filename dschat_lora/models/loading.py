"""Errors of loading a model's files, in one line of the user's terms."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError


def check_whole(report: Mapping[str, Any], *, new: Collection[str] = ()) -> None:
    """Refuse a model whose files lack weights, but for ``new`` ones: transformers would draw them.

    ``report`` is the loading information of ``from_pretrained``.

    Raises:
        ValueError: naming the first few.
    """
    missing = sorted(set(report["missing_keys"]) - set(new))
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
