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
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from dschat_lora.data.row_formats import format_files

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
    for left in directory.parent.glob(".building-*"):  # by processes that were killed
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > ABANDONED:
                lock = _claim(left)
                if lock is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(lock)
    with _building(directory) as temporary:
        # Of a process that was killed before it renamed the directory.
        (temporary / MANIFEST).unlink(missing_ok=True)
        for path in list(temporary.rglob("*")):
            plain = path.is_dir() or (path.is_file() and path.stat().st_nlink == 1)
            if path.is_symlink() or not plain:  # what is written to it would be elsewhere
                path.unlink()
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

    def block_digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.blake2b(file.read(BLOCK), digest_size=16).digest()

    starts = range(0, path.stat().st_size, BLOCK)
    if len(starts) < 2:
        return block_digest(0).hex()
    with ThreadPoolExecutor() as pool:
        blocks = pool.map(block_digest, starts)
        return hashlib.blake2b(b"".join(blocks), digest_size=16).hexdigest()


def code_digest() -> str:
    """Hash of the modules that decide what is prepared: of data, shuffling and row formats."""
    root = files("dschat_lora")
    modules = dict(_modules(root / "data"))
    modules |= {"seeds.py": root / "algos" / "seeds.py", **format_files()}
    digest = hashlib.blake2b(digest_size=16)
    for name, module in modules.items():
        digest.update(name.encode() + module.read_bytes())
    return digest.hexdigest()


def _modules(folder: Traversable, name: str = "") -> Iterator[tuple[str, Traversable]]:
    """The modules of a folder and those in it, with their paths."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from _modules(item, f"{name}{item.name}/")
        elif item.name.endswith(".py"):
            yield f"{name}{item.name}", item


@contextmanager
def _building(directory: Path) -> Iterator[Path]:
    """A sibling of ``directory`` to build in; it outlives a process that is killed.

    It is the one that such a process of this user has left, or a new one where another process
    builds there or it cannot be trusted. It also outlives one of whose processes one is killed.
    """
    left = directory.parent / f".building-{directory.name}"
    with suppress(OSError):
        left.mkdir(parents=True, exist_ok=True)
    claimed, temporary = _claim(left), left
    if claimed is None:
        temporary = left.with_name(f"{left.name}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            temporary.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--data_output_path {temporary.parent} is not writable ({error.strerror}); "
                "choose a writable directory"
            ) from error
    try:
        yield temporary
    except BaseException as error:
        if claimed is None or not isinstance(error, ChildProcessError | KeyboardInterrupt):
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    else:
        # Under the name of one that was moved, another process may build by now.
        if claimed is None or _is_at(claimed, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        if claimed is not None:
            os.close(claimed)


def _claim(path: Path) -> int | None:
    """A descriptor that holds a directory until it is closed; None where it cannot be held.

    It can be if it is this user's, no link, and no other process holds it.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid() and _is_at(lock, path):
            return lock
    os.close(lock)
    return None


def _is_at(lock: int, path: Path) -> bool:
    """Whether a path is still that of an open directory."""
    try:
        return os.path.samestat(os.fstat(lock), path.lstat())
    except OSError:
        return False


def _put_in_place(temporary: Path, directory: Path) -> None:
    """Move a finished directory to its name unless a sound one is there already."""
    # Another user may have made the file, who alone may write to it.
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # whatever lies there
    lock = os.open(directory.parent / ".lock", flags, 0o666)
    try:
        # Without the lock, a process that found an unsound directory could move away the
        # sound one by which another has just replaced it.
        with suppress(OSError):  # of a file system without locks
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
    finally:
        os.close(lock)
