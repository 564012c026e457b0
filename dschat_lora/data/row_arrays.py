"""Arrays with a few bytes for each row of all data, which lie in files."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Indices = NDArray[np.int64]
Digests = NDArray[np.uint64]  # (n, 2): 16 bytes each, all 0 where there is none
AT_A_TIME = 2**20  # rows of which there are copies in memory
SMALL = 2**20  # bytes


class RowArrays:
    """Makes arrays in files of a directory, so that memory does not grow with the rows.

    The system keeps as much of them in memory as it has room for. The files have no name, and are
    gone with the array.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def zeros(self, *shape: int, dtype: DTypeLike = np.int64) -> NDArray[Any]:
        """An array of this shape, in memory if it is small.

        Raises:
            OSError: if the disk has no room for it.
        """
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size < SMALL:
            return np.zeros(shape, dtype)
        with TemporaryFile(dir=self._directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk would end the process later
            return np.memmap(file, dtype, "r+", shape=shape)


def chunks(size: int) -> Iterator[slice]:
    """Slices of ``range(size)`` in order, of no more than ``AT_A_TIME``."""
    return (slice(n, min(n + AT_A_TIME, size)) for n in range(0, size, AT_A_TIME))


def first_equals(digests: Digests, arrays: RowArrays) -> Indices:
    """(n,) number of the first of all n digests that equals each one; its own where there is none.

    Digests are sorted a share at a time, by their first bits.
    """
    first = arrays.zeros(len(digests))
    bits = (len(digests) // AT_A_TIME).bit_length()
    for share in range(1 << bits):
        parts = []
        for part in chunks(len(digests)):
            # A shift by all 64 bits is not defined.
            is_own = digests[part, 0] >> np.uint64(63 - bits) >> np.uint64(1) == share
            parts.append(part.start + np.flatnonzero(is_own))
        own = np.concatenate([np.zeros(0, np.int64), *parts])
        mine = digests[own]
        order = np.lexsort((mine[:, 1], mine[:, 0]))  # equal ones stay in order
        own, mine = own[order], mine[order]
        begins = (mine[1:] != mine[:-1]).any(axis=1) | ~mine[1:].any(axis=1)
        begins = np.concatenate([np.ones(min(1, len(own)), bool), begins])
        first[own] = own[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first
