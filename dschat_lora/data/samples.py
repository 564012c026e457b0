"""Tokenised samples, and sets of them on disk: memory-mapped Arrow files."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.config.files import naming
from dschat_lora.data.digests import BlockHasher, DataDigest, DataIdentity, Field
from dschat_lora.data.rows import DataKind

Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class SequenceSample:
    """One tokenised record, and which of its tokens are supervised.

    ``runs`` are m lengths of runs of tokens that are not supervised and that are, in turn, from
    one of the first kind on: nothing precedes the first token. Their sum is n.
    """

    input_ids: Tokens  # (n,)
    runs: Sequence[int] | Tokens
    source: int = 0  # of several that metrics tell apart

    @classmethod
    def of(cls, input_ids: Sequence[int] | Tokens, labels: Sequence[int] | Tokens) -> Self:
        """A sample by (n,) labels, IGNORE_INDEX where a token is not supervised."""
        learnt = np.asarray(labels) != IGNORE_INDEX
        learnt[:1] = False
        borders = np.flatnonzero(np.diff(learnt)) + 1
        runs = np.diff(borders, prepend=0, append=len(learnt)).tolist()
        return cls(np.asarray(input_ids, np.int32), runs)

    @property
    def supervised(self) -> NDArray[np.bool_]:
        """(n,) whether a token is supervised."""
        return np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs)

    @property
    def labels(self) -> Tokens:
        """(n,) the supervised tokens, IGNORE_INDEX elsewhere."""
        return np.where(self.supervised, self.input_ids, np.int32(IGNORE_INDEX))

    @property
    def prompt(self) -> Tokens:
        """Tokens before the first supervised one."""
        return self.input_ids[: self.runs[0]]

    @property
    def num_supervised(self) -> int:
        """Supervised tokens."""
        return int(sum(self.runs[1::2]))

    def ends_in(self, token: int) -> bool:
        """Whether the last supervised token is ``token``."""
        behind = self.runs[-1] if len(self.runs) % 2 else 0
        return bool(self.input_ids[-1 - behind] == token)


@dataclass(frozen=True, eq=False)
class PairSample:
    """Two answers to one prompt, as a tree: the shared prefix, then the rest of each.

    ``input_ids`` is the shared prefix (prompt included), the rest of the chosen and the rest of
    the rejected sequence, one after another.
    """

    input_ids: Tokens  # (n,)
    prompt_length: int
    shared_length: int  # >= prompt_length: answers may begin alike too
    chosen_length: int  # of the rest of the chosen sequence
    margin: float = 0.0  # by how much the chosen answer is better
    # log-probabilities of the chosen and the rejected answer under a reference, in nats
    reference: tuple[float, float] = (math.nan, math.nan)

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids[: self.prompt_length]

    @property
    def chosen(self) -> Tokens:
        """(n,) the whole chosen sequence."""
        return self.input_ids[: self.shared_length + self.chosen_length]

    @property
    def rejected(self) -> Tokens:
        """(n,) the whole rejected sequence."""
        start = self.shared_length + self.chosen_length
        return np.concatenate([self.input_ids[: self.shared_length], self.input_ids[start:]])

    @property
    def num_supervised(self) -> int:
        """Tokens of both answers, those that they share once."""
        return len(self.input_ids) - self.prompt_length

    def ends_in(self, token: int) -> bool:
        """Whether ``token`` ends both answers."""
        return bool(self.chosen[-1] == token and self.rejected[-1] == token)


@dataclass(frozen=True, eq=False)
class UnpairedSample:
    """A prompt with an answer that is good or bad, and an answer to another prompt."""

    input_ids: Tokens  # (n,) the prompt and its answer
    mismatched_ids: Tokens  # (m,) the other prompt's answer, cut where prompt and it are too long
    prompt_length: int
    label: int  # 1 where the answer is desirable, 0 where it is not
    # log-probabilities of the answer and the mismatched one under a reference, in nats
    reference: tuple[float, float] = (math.nan, math.nan)

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids[: self.prompt_length]

    @property
    def mismatched(self) -> Tokens:
        """(prompt_length + m,) the prompt and the mismatched answer."""
        return np.concatenate([self.prompt, self.mismatched_ids])

    @property
    def num_supervised(self) -> int:
        """Tokens of the answer."""
        return len(self.input_ids) - self.prompt_length

    def ends_in(self, token: int) -> bool:
        """Whether ``token`` ends the answer."""
        return bool(self.input_ids[-1] == token)


@dataclass(frozen=True, eq=False)
class PromptSample:
    """A prompt to be answered, and the row that it comes from."""

    input_ids: Tokens  # (n,)
    columns: bytes  # the row as JSON, UTF-8
    source: int = 0  # of several that metrics tell apart

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids

    @property
    def num_supervised(self) -> int:
        """None."""
        return 0

    def ends_in(self, token: int) -> bool:
        """Never: there is no answer."""
        return False


AnySample = SequenceSample | PairSample | UnpairedSample | PromptSample

LIST = pa.large_list(pa.int32())  # 64-bit offsets: more than 2**31 tokens fit
TEXT = pa.large_binary()
CLASSES: dict[DataKind, type] = {
    "samples": SequenceSample,
    "pairs": PairSample,
    "unpaired": UnpairedSample,
    "prompts": PromptSample,
}
# Fields of the classes, as they are stored.
COLUMNS = {
    "samples": {"input_ids": LIST, "runs": LIST},
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
TOKENS_PER_BATCH = 2**22


@dataclass(frozen=True)
class Column:
    """Numbers, or with ``offsets``, where each begins and the last ends, lists or bytes."""

    values: NDArray[Any]
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    stored: pa.DataType = LIST

    @classmethod
    def of(cls, rows: Sequence[Any], stored: pa.DataType) -> "Column":
        """Rows of this type."""
        if stored in _DTYPES:
            return cls(np.array(rows, _DTYPES[stored]), stored=stored)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        if stored == TEXT:
            return cls(np.frombuffer(b"".join(rows), np.uint8), offsets, stored)
        if rows and isinstance(rows[0], np.ndarray):
            return cls(np.concatenate(rows, dtype=np.int32), offsets)
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets)

    @classmethod
    def read(cls, array: pa.Array) -> "Column":
        """Views of an array's buffers, since its own ``to_numpy`` would import pandas."""
        size, first, buffers = len(array), array.offset, array.buffers()
        if array.type in _DTYPES:
            dtype = np.dtype(_DTYPES[array.type])
            values = np.frombuffer(buffers[1], dtype, size, dtype.itemsize * first)
            return cls(values, stored=array.type)
        offsets = np.frombuffer(buffers[1], np.int64, size + 1, 8 * first)
        content = (buffers[2] or b"", np.uint8) if array.type == TEXT else (buffers[3], np.int32)
        values = np.frombuffer(*content)[offsets[0] : offsets[-1]]
        return cls(values, offsets - offsets[0], array.type)

    @property
    def array(self) -> pa.Array:
        """Of Arrow; made from buffers because ``pa.array`` would import pandas."""
        values = pa.py_buffer(np.ascontiguousarray(self.values))
        if not self.offsets.size:
            return pa.Array.from_buffers(self.stored, len(self.values), [None, values])
        size, ends = len(self.offsets) - 1, pa.py_buffer(self.offsets)
        if self.stored == TEXT:
            return pa.Array.from_buffers(TEXT, size, [None, ends, values])
        flat = pa.Array.from_buffers(pa.int32(), len(self.values), [None, values])
        return pa.Array.from_buffers(LIST, size, [None, ends], children=[flat])

    def __getitem__(self, row: int) -> Any:
        if not self.offsets.size:
            return self.values[row].item()
        start, end = self.offsets[row : row + 2]
        part = self.values[start:end]
        return part.tobytes() if self.stored == TEXT else part

    @classmethod
    def joined(cls, parts: Sequence["Column"]) -> "Column":
        """The rows of n >= 1 columns."""
        values, first = np.concatenate([part.values for part in parts]), parts[0]
        if not first.offsets.size:
            return cls(values, stored=first.stored)
        begins = np.cumsum([0, *(len(part.values) for part in parts)])
        offsets = [part.offsets[:-1] + begin for part, begin in zip(parts, begins, strict=False)]
        return cls(values, np.concatenate([*offsets, begins[-1:]]), first.stored)

    def take(self, rows: NDArray[np.int64]) -> "Column":
        """Those of these rows, in their order."""
        if not self.offsets.size:
            return replace(self, values=self.values[rows])
        starts, sizes = self.offsets[rows], np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, sizes)
        return Column(self.values[within], offsets, self.stored)


Columns = dict[str, Column]


class Samples(Protocol):
    """Samples by index: a :class:`TokenSet` or a list."""

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class SourcedSamples:
    """Samples of rows with the numbers of their sources."""

    samples: Samples
    sources: NDArray[np.int64]  # (n,)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Any:
        return replace(self.samples[index], source=int(self.sources[index]))


class TokenSet:
    """``token_set[i]`` is sample or pair ``i``, its arrays views of the columns."""

    def __init__(
        self, chunks: list[Columns], kind: DataKind = "samples", *, known: DataDigest | None = None
    ) -> None:
        """With the digest that :func:`write_set` returned, if it is ``known``."""
        sizes = [len(chunk["input_ids"].offsets) - 1 for chunk in chunks]
        self._chunks, self._class, self._known = chunks, CLASSES[kind], known
        self._starts = np.cumsum([0, *sizes])

    @classmethod
    def read(
        cls, path: Path, kind: DataKind = "samples", known: DataDigest | None = None
    ) -> "TokenSet":
        """The samples of an Arrow file, which is memory-mapped."""
        return cls(read_table(path)[0], kind, known=known)

    @classmethod
    def of(cls, samples: Sequence[AnySample]) -> "TokenSet":
        """Samples of one class, in memory."""
        kinds = [kind for kind, each in CLASSES.items() if samples and type(samples[0]) is each]
        kind = kinds[0] if kinds else "samples"
        columns = {
            name: Column.of([getattr(sample, name) for sample in samples], stored)
            for name, stored in COLUMNS[kind].items()
        }
        return cls([columns], kind)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        chunk = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = int(index - self._starts[chunk])
        return self._class(**{name: c[row] for name, c in self._chunks[chunk].items()})

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(len,) tokens of each sample."""
        sizes = [np.diff(offsets) for offsets, _ in self.lists("input_ids")]
        return np.concatenate([np.zeros(0, np.int64), *sizes])

    def column(self, name: str) -> NDArray[Any]:
        """(len,) all values of a field that is a number."""
        chunks = [chunk[name].values for chunk in self._chunks]
        return np.concatenate(chunks) if chunks else np.zeros(0)

    def lists(self, name: str) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """Chunks of a field that is a list: offsets of the lists and of the end, and all values."""
        for chunk in self._chunks:
            yield chunk[name].offsets, chunk[name].values

    @cached_property
    def blocks(self) -> DataDigest:
        """Of what every sample is, in order, however they are stored."""
        if self._known is not None:
            return self._known
        hasher = BlockHasher()
        for chunk in self._chunks:
            hasher.update(_fields(chunk))
        return hasher.digest()

    @property
    def digest(self) -> str:
        """32 hex digits of :attr:`blocks`."""
        return self.blocks.text

    @property
    def identity(self) -> DataIdentity:
        """What a checkpoint knows these samples by."""
        return DataIdentity(self.blocks, self.stored_digest)

    def stored_digest(self) -> str:
        """32 hex digits of the columns as they are stored: what checkpoints of 0.3.0 may hold."""
        parts: dict[str, Any] = {}
        for chunk in self._chunks:
            lengths = np.diff(chunk["input_ids"].offsets)
            for name, values in {"": lengths, **{n: c.values for n, c in chunk.items()}}.items():
                part = parts.setdefault(name, hashlib.blake2b(digest_size=16))
                part.update(np.ascontiguousarray(values).data)
        whole = b"".join(part.digest() for part in parts.values())
        return hashlib.blake2b(whole, digest_size=16).hexdigest()


def _fields(chunk: Columns) -> dict[str, Field]:
    """What the samples of a chunk are: numbers, and lists with their lengths, by name.

    Which tokens are supervised is a byte for each, whatever the runs that say so.
    """
    tokens = chunk["input_ids"].offsets
    each = np.arange(len(tokens))
    fields: dict[str, Field] = {}
    for name, column in chunk.items():
        if not column.offsets.size:
            fields[name] = column.values, each
        elif name == "runs":
            of_sample = np.arange(len(column.values)) - np.repeat(
                column.offsets[:-1], np.diff(column.offsets)
            )
            flags = np.repeat(of_sample.astype(np.uint8) % 2, column.values)
            fields["supervised"] = flags, tokens
        else:
            fields[name] = column.values, column.offsets
            fields[f"{name} lengths"] = np.diff(column.offsets), each
    return fields


def write_samples(
    path: Path,
    samples: Iterable[AnySample],
    kind: DataKind = "samples",
    notes: Mapping[str, bytes] | None = None,
) -> None:
    """Write samples to an Arrow file, a few thousand in memory at a time."""
    rest, types = iter(samples), COLUMNS[kind]
    groups = iter(lambda: list(islice(rest, SAMPLES_PER_BATCH)), [])
    batches = (
        {name: Column.of([getattr(s, name) for s in group], types[name]) for name in types}
        for group in groups
    )
    write_table(path, batches, types, notes)


def write_set(path: Path, batches: Iterable[Columns], kind: DataKind) -> DataDigest:
    """Write samples in columns to an Arrow file, and return :attr:`TokenSet.blocks` of them."""
    hasher = BlockHasher()

    def joined() -> Iterator[Columns]:
        rest = iter(batches)
        while waiting := list(islice(rest, 1)):
            size = len(waiting[0]["input_ids"].values)
            while size < TOKENS_PER_BATCH and (more := list(islice(rest, 1))):
                waiting += more
                size += len(more[0]["input_ids"].values)
            columns = {name: Column.joined([each[name] for each in waiting]) for name in waiting[0]}
            hasher.update(_fields(columns))
            yield columns

    write_table(path, joined(), COLUMNS[kind])
    return hasher.digest()


def write_table(
    path: Path | pa.BufferOutputStream,
    batches: Iterable[Columns],
    types: Mapping[str, pa.DataType],
    notes: Mapping[str, bytes] | None = None,
) -> None:
    """Write columns of these types to an Arrow file or stream, a batch in memory at a time."""
    schema = pa.schema([pa.field(*field) for field in types.items()], metadata=notes)
    with ExitStack() as stack:
        file = path
        if isinstance(path, Path):
            stack.enter_context(naming(path))
            file = stack.enter_context(pa.OSFile(str(path), "wb"))
        writer = stack.enter_context(pa.ipc.new_file(file, schema))
        for columns in batches:
            arrays = [columns[name].array for name in types]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def read_table(path: Path | bytes) -> tuple[list[Columns], Mapping[bytes, bytes]]:
    """The batches of columns that :func:`write_table` wrote, memory-mapped, and its notes.

    Raises:
        ValueError: if the file is not whole.
        OSError: if it cannot be read.
    """
    with pa.BufferReader(path) if isinstance(path, bytes) else pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        names, notes = reader.schema.names, reader.schema.metadata or {}
    return [{name: Column.read(batch.column(name)) for name in names} for batch in batches], notes


def is_whole(path: Path) -> bool:
    """Whether a file is there and was written to its end."""
    try:
        read_table(path)
    except (OSError, ValueError):
        return False
    return True
