"""Token sets on disk: memory-mapped Arrow files in cache directories that appear complete."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import AnySample, PairSample, PromptSample, Sample, UnpairedSample

LIST = pa.large_list(pa.int32())  # 64-bit offsets: more than 2**31 tokens fit
TEXT = pa.large_binary()
CLASSES: dict[DataKind, type] = {
    "samples": Sample,
    "pairs": PairSample,
    "unpaired": UnpairedSample,
    "prompts": PromptSample,
}
# Fields of the classes, as they are stored.
COLUMNS = {
    "samples": {"input_ids": LIST, "labels": LIST},
    "pairs": {
        "input_ids": LIST,
        "prompt_length": pa.int32(),
        "shared_length": pa.int32(),
        "chosen_length": pa.int32(),
        "margin": pa.float32(),
    },
    "unpaired": {
        "input_ids": LIST,
        "mismatched_ids": LIST,
        "prompt_length": pa.int32(),
        "label": pa.int32(),
    },
    "prompts": {"input_ids": LIST, "columns": TEXT},
}
_DTYPES = {pa.int32(): np.int32, pa.float32(): np.float32}
SAMPLES_PER_BATCH = 4096
MANIFEST = "manifest.json"


class TokenSet:
    """``token_set[i]`` is sample or pair ``i`` of an Arrow file, its arrays views of the file."""

    def __init__(self, path: Path, kind: DataKind = "samples") -> None:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        self._class = CLASSES[kind]
        self._chunks: list[dict[str, Any]] = [
            {name: _column(table.column(name).chunk(number)) for name in COLUMNS[kind]}
            for number in range(table.column(0).num_chunks)
        ]
        self._starts = np.cumsum([0, *(len(chunk["input_ids"]) for chunk in self._chunks)])
        #: (len,) int64, tokens of each sample
        self.lengths: NDArray[np.int64] = np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(c["input_ids"].offsets) for c in self._chunks)]
        )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """(len,) all values of a field that is a number."""
        chunks = [chunk[name].values for chunk in self._chunks]
        return np.concatenate(chunks) if chunks else np.zeros(0)

    def lists(self, name: str) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Chunks of a field that is a list: offsets of the lists and of the end, and all values."""
        for chunk in self._chunks:
            yield chunk[name].offsets, chunk[name].values

    @cached_property
    def digest(self) -> str:
        """32 hex digits of every field of every sample, in order."""
        digest = hashlib.blake2b(self.lengths.tobytes(), digest_size=16)
        for chunk in self._chunks:
            for column in chunk.values():
                digest.update(column.values.data)
        return digest.hexdigest()

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = int(index - self._starts[chunk])
        return self._class(**{name: c[row] for name, c in self._chunks[chunk].items()})


def write_samples(path: Path, samples: Iterable[AnySample], kind: DataKind = "samples") -> None:
    """Write samples to an Arrow file, a few thousand in memory at a time."""
    types, rest = COLUMNS[kind], iter(samples)
    schema = pa.schema([pa.field(name, stored) for name, stored in types.items()])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        while group := list(islice(rest, SAMPLES_PER_BATCH)):
            columns = [
                _arrow([getattr(sample, name) for sample in group], stored)
                for name, stored in types.items()
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def load_or_build(
    directory: Path, build: Callable[[Path], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Content of a cache directory, built first unless a complete and sound one is there.

    ``build`` writes files into a temporary directory next to it and returns the content to keep
    with them; the directory is then renamed. Several processes may do so at once, and one that is
    killed leaves nothing that could be taken for a result. The directory's name identifies the
    content. Returns that, and True if it was read from the cache.
    """
    content = read_content(directory)
    if content is not None:
        return content, True
    temporary = _make_temporary(directory)
    try:
        content = build(temporary)
        files = {path.name: file_digest(path) for path in sorted(temporary.iterdir())}
        manifest = {"name": directory.name, "files": files, "content": content}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
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


@dataclass(frozen=True)
class _Numbers:
    """A column of numbers."""

    values: NDArray[Any]

    def __getitem__(self, row: int) -> int | float:
        number: int | float = self.values[row].item()
        return number


@dataclass(frozen=True)
class _Lists:
    """A column of lists, or of bytes: where each begins (and the last ends), and all values."""

    offsets: NDArray[np.int64]
    values: NDArray[Any]
    as_bytes: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any] | bytes:
        start, end = self.offsets[row : row + 2]
        values = self.values[start:end]
        return values.tobytes() if self.as_bytes else values


def _column(array: pa.Array) -> _Numbers | _Lists:
    """A column as views of its buffers.

    Buffers are read directly because the array's own ``to_numpy`` would import pandas.
    """
    size, first, buffers = len(array), array.offset, array.buffers()
    if array.type in _DTYPES:
        dtype = np.dtype(_DTYPES[array.type])
        return _Numbers(np.frombuffer(buffers[1], dtype, size, dtype.itemsize * first))
    offsets = np.frombuffer(buffers[1], np.int64, size + 1, 8 * first)
    values: NDArray[Any] = (
        np.frombuffer(buffers[2] or b"", np.uint8)
        if array.type == TEXT
        else np.frombuffer(buffers[3], np.int32)
    )
    part = values[offsets[0] : offsets[-1]]
    return _Lists(offsets - offsets[0], part, as_bytes=array.type == TEXT)


def _arrow(rows: Sequence[Any], stored: pa.DataType) -> pa.Array:
    """An Arrow array; made from buffers because ``pa.array`` would import pandas."""
    if stored in _DTYPES:
        numbers = pa.py_buffer(np.array(rows, dtype=_DTYPES[stored]))
        return pa.Array.from_buffers(stored, len(rows), [None, numbers])
    ends = pa.py_buffer(np.cumsum([0, *map(len, rows)], dtype=np.int64))
    if stored == TEXT:
        return pa.Array.from_buffers(TEXT, len(rows), [None, ends, pa.py_buffer(b"".join(rows))])
    values = np.ascontiguousarray(np.concatenate(rows), dtype=np.int32)
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(LIST, len(rows), [None, ends], children=[flat])


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


def _make_temporary(directory: Path) -> Path:
    """A new sibling of ``directory``, readable by all who may read the cache."""
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
