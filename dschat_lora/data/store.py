"""Token sets on disk: memory-mapped Arrow files."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dschat_lora.config.files import naming
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


class TokenSet:
    """``token_set[i]`` is sample or pair ``i`` of an Arrow file, its arrays views of the file."""

    def __init__(
        self, path: Path, kind: DataKind = "samples", *, digest: str | None = None
    ) -> None:
        """With the ``digest`` that :func:`join` returned, if it is known."""
        self._class, self._digest = CLASSES[kind], digest
        self._chunks: list[dict[str, Any]] = read_table(path).batches
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
        if self._digest is not None:
            return self._digest
        digest = _Digest()
        for chunk in self._chunks:
            digest.update(chunk)
        return digest.hexdigest()

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = int(index - self._starts[chunk])
        return self._class(**{name: c[row] for name, c in self._chunks[chunk].items()})


@dataclass(frozen=True)
class Table:
    """An Arrow file, memory-mapped."""

    batches: list[dict[str, Any]]  # columns by name
    notes: Mapping[bytes, bytes]  # what was written beside them


def write_samples(
    path: Path,
    samples: Iterable[AnySample],
    kind: DataKind = "samples",
    notes: Mapping[str, bytes] | None = None,
) -> None:
    """Write samples to an Arrow file, a few thousand in memory at a time."""
    rest, types = iter(samples), COLUMNS[kind]
    groups = iter(lambda: list(islice(rest, SAMPLES_PER_BATCH)), [])
    batches = ({name: [getattr(s, name) for s in group] for name in types} for group in groups)
    write_table(path, batches, types, notes)


def write_table(
    path: Path,
    batches: Iterable[Mapping[str, Sequence[Any]]],
    types: Mapping[str, pa.DataType],
    notes: Mapping[str, bytes] | None = None,
) -> None:
    """Write rows of columns to an Arrow file, a batch in memory at a time."""
    schema = pa.schema([pa.field(*field) for field in types.items()], metadata=notes)
    with _writer(path, schema) as writer:
        for batch in batches:
            columns = [_arrow(batch[name], stored) for name, stored in types.items()]
            writer.write_batch(pa.record_batch(columns, schema=schema))


@contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    with naming(path), pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


def read_table(path: Path) -> Table:
    """What :func:`write_table` wrote.

    Raises:
        ValueError: if the file is not whole.
        OSError: if it cannot be read.
    """
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        notes, batches = reader.schema.metadata, list(_batches(reader))
    columns = [{name: _column(b.column(name)) for name in b.schema.names} for b in batches]
    return Table(columns, notes or {})


def is_whole(path: Path) -> bool:
    """Whether a file is there and was written to its end."""
    try:
        read_table(path)
    except (OSError, ValueError):
        return False
    return True


def join(parts: Iterable[Path], path: Path, kind: DataKind) -> str:
    """Write the samples of several files to one, and return the digest of all."""
    schema = pa.schema([pa.field(*field) for field in COLUMNS[kind].items()])
    digest = _Digest()
    with _writer(path, schema) as writer:
        for part in parts:
            with pa.memory_map(str(part)) as source:
                for batch in _batches(pa.ipc.open_file(source)):
                    writer.write_batch(batch.replace_schema_metadata(None))
                    digest.update({name: _column(batch.column(name)) for name in COLUMNS[kind]})
    return digest.hexdigest()


def _batches(reader: pa.ipc.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    return map(reader.get_batch, range(reader.num_record_batches))


class _Digest:
    """Hash of every field of samples, whatever the batches that they are written in."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def update(self, batch: Mapping[str, Any]) -> None:
        lengths = np.diff(batch["input_ids"].offsets)
        for name, values in {"": lengths, **{n: c.values for n, c in batch.items()}}.items():
            part = self._parts.setdefault(name, hashlib.blake2b(digest_size=16))
            part.update(np.ascontiguousarray(values).data)

    def hexdigest(self) -> str:
        parts = b"".join(part.digest() for part in self._parts.values())
        return hashlib.blake2b(parts, digest_size=16).hexdigest()


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
    values = np.concatenate([np.zeros(0, np.int32), *rows], dtype=np.int32)
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.Array.from_buffers(LIST, len(rows), [None, ends], children=[flat])
