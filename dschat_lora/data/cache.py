"""Cache directories that appear complete, and that several processes may fill at once."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
BLOCK = 4 * 2**20  # bytes that are hashed at once
ABANDONED = 7 * 24 * 3600  # seconds after which an unfinished directory is removed


def load_or_build(
    directory: Path, build: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Content of a cache directory, built first unless a complete and sound one is there.

    ``build`` writes files into a temporary directory next to it and returns the content to keep
    with them; the directory is then renamed. Several processes may do so at once, and one that is
    killed leaves nothing that could be taken for a result; the next one to build the same finds
    the files that it left. The directory's name identifies the content. Returns that, and True if
    it was read from the cache.
    """
    content = read_content(directory)
    if content is not None:
        return content, True
    _remove_abandoned(directory.parent)
    with _building(directory) as temporary:
        content = build(temporary)
        files = {path.name: file_digest(path) for path in sorted(temporary.iterdir())}
        manifest = {"name": directory.name, "files": files, "content": content}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _put_in_place(temporary, directory)
    return content, False


def read_content(directory: Path) -> dict[str, Any] | None:
    """The content of a cache directory, None if a file is not as it was written."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["name"] != directory.name:
            return None
        for name, digest in manifest["files"].items():
            if Path(name).name != name or file_digest(directory / name) != digest:
                return None
        content: dict[str, Any] = manifest["content"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content


def file_digest(path: Path) -> str:
    """Hash of a file's content, of blocks that several threads hash."""
    starts = range(0, path.stat().st_size, BLOCK)
    if len(starts) < 2:
        return _block_digest(path, 0).hex()
    with ThreadPoolExecutor() as pool:
        blocks = pool.map(partial(_block_digest, path), starts)
        return hashlib.blake2b(b"".join(blocks), digest_size=16).hexdigest()


def _block_digest(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(BLOCK), digest_size=16).digest()


@contextmanager
def _building(directory: Path) -> Iterator[Path]:
    """A sibling of ``directory`` to build in; it outlives a process that is killed.

    It is the one that such a process has left, or a new one where another process builds there.
    """
    left = directory.parent / f".building-{directory.name}"
    _make(left)
    lock = os.open(left, os.O_RDONLY)
    temporary = left
    try:
        if not _is_own(lock, left):
            temporary = left.with_name(f"{left.name}-{os.getpid()}-{secrets.token_hex(4)}")
            _make(temporary)
        yield temporary
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    else:
        shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.close(lock)


def _make(path: Path) -> None:
    """A directory that all who may read the cache may read."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--data_output_path {path.parent} cannot be written ({error.strerror}); "
            "name a directory that can"
        ) from error


def _is_own(lock: int, path: Path) -> bool:
    """Whether this process holds the directory, and it still has its name."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_ino == path.stat().st_ino
    except OSError:
        return False


def _remove_abandoned(cache: Path) -> None:
    """Remove what processes that were killed long ago have left."""
    for path in cache.glob(".building-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                lock = os.open(path, os.O_RDONLY)
                if _is_own(lock, path):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _put_in_place(temporary: Path, directory: Path) -> None:
    """Move a finished directory to its name unless a sound one is there already."""
    with (directory.parent / ".lock").open("w") as lock:
        # Without the lock, a process that found an unsound directory could move away the
        # sound one by which another has just replaced it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_content(directory) is not None:
            return
        if os.path.lexists(directory):
            unsound = temporary.with_name(temporary.name + "-unsound")
            directory.rename(unsound)
            if unsound.is_dir() and not unsound.is_symlink():
                shutil.rmtree(unsound)
            else:
                unsound.unlink()
        temporary.rename(directory)
