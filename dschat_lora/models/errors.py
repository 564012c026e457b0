"""One clear line instead of a hub client's traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


@contextmanager
def hub_errors(option: str, name: str, what: str) -> Iterator[None]:
    """Turn a failure to find or read ``name`` into a ValueError that names the option."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{option} {name}: its {what} cannot be loaded: {reason}") from error
