"""Tokenised samples on disk: memory-mapped Arrow files in directories put in place whole."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dschat_lora.data.tokenize import Sample

COLUMNS = ("input_ids", "labels")
LIST = pa.large_list(pa.int32())  # 64-bit offsets: more than 2**31 tokens fit
SCHEMA = pa.schema([pa.field(name, LIST) for name in COLUMNS])
SAMPLES_PER_BATCH = 4096
MANIFEST = "manifest.json"


class TokenSet:
    """``token_set[i]`` is sample ``i`` of an Arrow file, its arrays views of the file."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        chunks = [
            [column.chunk(number) for column in table.columns]
            for number in range(table.column(0).num_chunks)
        ]
        self._offsets = [_list_offsets(columns[0]) for columns in chunks]
        self._values = [[_list_values(column) for column in columns] for columns in chunks]
        sizes = [len(offsets) - 1 for offsets in self._offsets]
        self._starts = np.cumsum([0, *sizes])
        #: (len,) int64, tokens of each sample
        self.lengths: NDArray[np.int64] = np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(offsets) for offsets in self._offsets)]
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def digest(self) -> str:
        """32 hex digits of the tokens and labels of every sample, in order."""
        digest = hashlib.blake2b(self.lengths.tobytes(), digest_size=16)
        for offsets, columns in zip(self._offsets, self._values, strict=True):
            for values in columns:
                digest.update(values[offsets[0] : offsets[-1]].data)
        return digest.hexdigest()

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - self._starts[chunk]
        start, end = self._offsets[chunk][row : row + 2]
        input_ids, labels = self._values[chunk]
        return Sample(input_ids[start:end], labels[start:end])


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples to an Arrow file, a few thousand in memory at a time."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for group in _groups(samples, SAMPLES_PER_BATCH):
            columns = [_list_array([getattr(sample, name) for sample in group]) for name in COLUMNS]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))


def load_or_build(
    directory: Path, build: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Contents of a cache directory, built first unless a whole and sound one is there.

    ``build`` fills a temporary directory beside it, which is then renamed: several processes
    may do so at once, and one that is killed leaves nothing that could be taken for a result.

    Args:
        directory: where the result belongs; its name identifies the content.
        build: writes files into the directory it is given and returns what to keep with them.

    Returns:
        What ``build`` returned (now or earlier), and True if it was read from the cache.
    """
    content = _read(directory)
    if content is not None:
        return content, True
    temporary = _make_temporary(directory)
    try:
        content = build(temporary)
        _write_manifest(temporary, directory.name, content)
        _put_in_place(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return content, False


def file_digest(path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while group := list(islice(iterator, size)):
        yield group


def _list_offsets(array: Any) -> NDArray[np.int64]:
    """Where each list begins, and where the last one ends, as a view.

    Buffers are read directly because the array's own ``to_numpy`` would import pandas.
    """
    return np.frombuffer(array.buffers()[1], np.int64, len(array) + 1, 8 * array.offset)


def _list_values(array: Any) -> NDArray[np.int32]:
    """All values one after another, as a view."""
    return np.frombuffer(array.buffers()[3], np.int32)


def _list_array(rows: Sequence[NDArray[np.int32]]) -> Any:
    """An Arrow list array; made from buffers because ``pa.array`` would import pandas."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = np.ascontiguousarray(np.concatenate(rows), dtype=np.int32)
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(LIST, len(rows), buffers, children=[flat])


def _write_manifest(directory: Path, name: str, content: dict[str, Any]) -> None:
    files = {path.name: file_digest(path) for path in sorted(directory.iterdir())}
    manifest = {"name": name, "files": files, "content": content}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _read(directory: Path) -> dict[str, Any] | None:
    """The content kept with a directory, None if anything about it is not as it was written."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["name"] != directory.name:
            return None
        for name, digest in manifest["files"].items():
            if file_digest(directory / name) != digest:
                return None
        content: dict[str, Any] = manifest["content"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return content


def _make_temporary(directory: Path) -> Path:
    """A new directory beside ``directory``, readable by whoever may read the cache."""
    temporary = directory.parent / f".building-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"--data_output_path {directory.parent} cannot be written ({error.strerror}); "
            "name a directory that can"
        ) from error
    return temporary


def _put_in_place(temporary: Path, directory: Path) -> None:
    """Move a finished directory to its name unless a sound one is there already."""
    with (directory.parent / ".lock").open("w") as lock:
        # Without the lock, a process that found an unsound directory could move away the
        # sound one that another has just put in its place.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _read(directory) is not None:
            return
        if os.path.lexists(directory):
            unsound = temporary.with_name(temporary.name + "-unsound")
            directory.rename(unsound)
            _delete(unsound)
        temporary.rename(directory)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
