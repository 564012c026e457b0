"""Writes: atomic ones, and those that stay within a directory that may be somebody else's."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dschat_lora.config.files import naming

# Directories that are written to, by their absolute names, and an open descriptor of each. While
# that is open no other directory has its number.
_occupied: dict[Path, int] = {}


@contextmanager
def occupied(directory: Path) -> Iterator[int]:
    """Inside the block nothing is written below another directory that takes this one's name.

    Nor is it through a link that leads out of it, as :func:`check_place` says. Gives a descriptor
    of the directory.
    """
    name, descriptor = Path(os.path.abspath(directory)), os.open(directory, os.O_RDONLY)
    earlier = _occupied.get(name)
    _occupied[name] = descriptor
    try:
        yield descriptor
    finally:
        if earlier is None:
            del _occupied[name]
        else:
            _occupied[name] = earlier
        os.close(descriptor)


@contextmanager
def alone(directory: Path, what: str, *, option: str = "output_dir") -> Iterator[None]:
    """Make the directory and, inside the block, occupy it and keep others that do so out of it.

    ``what`` is what works there, for the message.

    Raises:
        ValueError: if one is there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with occupied(directory) as descriptor:
        try:
            # Ends with this process, however it ends: child processes do not inherit it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another {what} is running in {directory}; wait for it, stop it, or choose "
                f"another --{option}"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


def check_place(path: Path) -> None:
    """Refuse to write to a path below an occupied directory that is not there any more.

    Raises:
        OSError: naming the directory, or the link to the path's parent that leads out of it.
    """
    for home in _homes(path):
        try:
            same = os.path.samestat(os.fstat(_occupied[home]), os.stat(home))
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            words = "it was moved, deleted or replaced while it was written to"
            named = str(home) if path.is_absolute() else os.path.relpath(home)
            raise FileNotFoundError(errno.ENOENT, words, named)
        try:
            check_within(path.parent, home)
        except ValueError as error:
            raise OSError(str(error)) from error


def check_within(path: Path, home: Path) -> None:
    """Refuse a path below ``home`` that is to be written to, where it is not what it seems.

    Raises:
        ValueError: if a link on the way leads out of ``home``, or the path is a pipe or a device.
    """
    target = Path(os.path.realpath(path))
    if not target.is_relative_to(os.path.realpath(home)):
        link = next(each for each in (path, *path.parents) if each.is_symlink())
        raise ValueError(
            f"{link} is a link to {os.path.realpath(link)}; files written to {home} must stay "
            "there: remove the link, or link the whole directory"
        )
    if not (target.is_file() or target.is_dir()) and os.path.lexists(target):
        raise ValueError(f"{path} is not a regular file; remove it")


def open_in_place(path: Path, mode: str, *, buffering: int = -1) -> Any:
    """A file of a directory, opened to be written where it is; text is UTF-8.

    The directory is the occupied one around it, or else its parent.

    Raises:
        OSError: if it leads out of there, as :func:`check_place` and :func:`check_within` say, or
            has another name too (a hard link); or if it cannot be opened.
    """

    def within(name: str, flags: int) -> int:
        check_place(path)
        try:
            check_within(path, next(_homes(path), path.parent))
        except ValueError as error:
            raise OSError(str(error)) from error
        # A pipe is not waited for, and nothing is cut off before it is known what it is.
        flags = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(os.path.realpath(path), flags, 0o666)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            if mode[0] == "w":
                os.ftruncate(descriptor, 0)
            return descriptor
        os.close(descriptor)
        words = "it is not a regular file"
        if stat.S_ISREG(status.st_mode):
            words = f"it has {status.st_nlink} hard links: replace it by a copy"
        raise OSError(errno.EPERM, words, str(path))

    encoding = None if "b" in mode else "utf-8"
    return open(str(path), mode, buffering=buffering, encoding=encoding, opener=within)


def _homes(path: Path) -> Iterator[Path]:
    """The occupied directories that a path is below."""
    absolute = Path(os.path.abspath(path))
    return (home for home in list(_occupied) if absolute.is_relative_to(home) and absolute != home)


@contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """An empty sibling of ``final`` that takes its name when the block succeeds.

    Files are synced before the rename. An earlier ``final`` stays whole until its successor is
    complete; between the two renames that swap them its name is ``.NAME.old``. If the block
    raises, ``final`` is as before; leftovers of a killed process are cleared by the next. One
    process at a time may write ``final``.

    Raises:
        OSError: as :func:`check_place`, also where that holds no more at the end.
    """
    check_place(final)
    if not final.parent.is_dir():
        final.parent.mkdir(parents=True)
        _sync(final.parent.parent)
    staging = final.parent / f".{final.name}.tmp"
    remove(staging)
    staging.mkdir()
    try:
        with naming(final):
            yield staging
            for path in staging.rglob("*"):
                if path.is_file():
                    # Some writers deny others access whatever the umask; the directory follows it.
                    path.chmod(staging.stat().st_mode & 0o666)
            sync_all(staging)
            check_place(final)
            _swap(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def staged_file(final: Path) -> Iterator[Path]:
    """A path next to ``final`` whose file takes its name when the block succeeds.

    Raises:
        OSError: as :func:`check_place`.
    """
    check_place(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}.tmp")
    staging.unlink(missing_ok=True)  # it may be a link
    try:
        with naming(final):
            yield staging
            _sync(staging)
            check_place(final)
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


def remove(path: Path) -> None:
    """Delete a directory, file or link, if it is there; a link's target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swap(staging: Path, final: Path) -> None:
    old = final.parent / f".{final.name}.old"
    replaces = os.path.lexists(final)
    if replaces:
        remove(old)
        final.rename(old)
    try:
        staging.rename(final)
    except OSError:
        if replaces:
            old.rename(final)
        raise
    _sync(final.parent)
    with suppress(OSError):
        remove(old)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
