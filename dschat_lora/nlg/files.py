"""A file that appears under its name complete, or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` beside ``path`` and give it its name; directories are made where needed.

    Raises:
        OSError: with the file's name.
    """
    path = path.expanduser()
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        staged.unlink(missing_ok=True)
