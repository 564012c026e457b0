"""Rows of sample indices as arrays, kept in the cache once they are made."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from dschat_lora.data.cache import load_or_build
from dschat_lora.data.fingerprint import code_digest

PackedRow = tuple[int, ...]  # sample indices


class PackedRows(Sequence[PackedRow]):
    """Rows of sample indices, of which no Python object is kept."""

    def __init__(self, samples: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """``samples`` (n,) are those of all rows, ``ends`` (rows,) where each row ends in them."""
        self.samples, self.ends = samples, ends

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "PackedRows":
        """These rows."""
        if isinstance(rows, PackedRows):
            return rows
        rows = list(rows)
        samples = np.fromiter(chain.from_iterable(rows), np.int64)
        return cls(samples, np.cumsum([len(row) for row in rows], dtype=np.int64))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(rows,) samples of each row."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...

    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        end = int(self.ends[index])
        start = int(self.ends[index - 1]) if index % len(self) else 0
        return tuple(self.samples[start:end].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash((self.samples.tobytes(), self.ends.tobytes()))


def keep_rows(cache: Path, key: object, make: Callable[[], PackedRows]) -> PackedRows:
    """The rows that ``make`` returns, from the cache if they were made before.

    ``key``, JSON-ready, says all that they depend on but this package's code.
    """
    text = json.dumps([key, code_digest()], sort_keys=True)
    directory = cache / f"rows-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def build(directory: Path) -> dict[str, int]:
        rows = make()
        for name in ("samples", "ends"):
            np.save(directory / f"{name}.npy", getattr(rows, name))
        return {"rows": len(rows)}

    try:
        load_or_build(directory, build)
    except (OSError, ValueError):  # of a cache that cannot be written, or of ``make`` itself
        return make()
    return PackedRows(
        *(np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("samples", "ends"))
    )
