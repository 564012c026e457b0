"""Atomic writes: a directory or file that appears under its name complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dschat_lora.config.files import naming


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """An empty sibling of ``final`` that takes its name when the block succeeds.

    Files are synced before the rename. An earlier ``final`` stays whole until its successor is
    complete; between the two renames that swap them its name is ``.NAME.old``. If the block
    raises, ``final`` is as before; leftovers of a killed process are cleared by the next. One
    process at a time may write ``final``.
    """
    if not final.parent.is_dir():
        final.parent.mkdir(parents=True)
        _sync(final.parent.parent)
    staging = final.parent / f".{final.name}.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        with naming(final):
            yield staging
            for path in staging.rglob("*"):
                if path.is_file():
                    # Some writers deny others access whatever the umask; the directory follows it.
                    path.chmod(staging.stat().st_mode & 0o666)
            sync_all(staging)
            _swap(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def staged_file(final: Path) -> Iterator[Path]:
    """A path next to ``final`` whose file takes its name when the block succeeds."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}.tmp")
    try:
        with naming(final):
            yield staging
            _sync(staging)
            staging.replace(final)
            _sync(final.parent)
    finally:
        staging.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to a file that takes its name when it is complete."""
    with staged_file(path) as staging:
        staging.write_text(text, encoding="utf-8")


def sync_all(directory: Path) -> None:
    """Bring a directory with everything in it to the disk."""
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _swap(staging: Path, final: Path) -> None:
    old = final.parent / f".{final.name}.old"
    replaces = final.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        staging.rename(final)
    except OSError:
        if replaces:
            old.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
