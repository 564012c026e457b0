"""What samples are, by blocks of them: how a checkpoint knows its data, however that is stored."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 64  # samples; twice as many as often as there would be more than MOST blocks
MOST = 1024
NOT_COMPARED = (
    "(was of an earlier version's digest, or of other data: its tokens could not be compared)"
)
# A field of samples: its numbers, and where those of each sample begin and the last ones end.
Field = tuple["NDArray[Any]", "NDArray[np.int64]"]


@dataclass(frozen=True)
class DataDigest:
    """Hashes of blocks of samples, in order."""

    samples: int
    block: int  # samples of each block, but perhaps of the last one
    blocks: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "DataDigest":
        """The digest whose fields were written as JSON.

        Raises:
            KeyError, TypeError, ValueError: if they are not those of a digest.
        """
        digest = cls(int(values["samples"]), int(values["block"]), tuple(values["blocks"]))
        times, rest = divmod(digest.block, BLOCK)
        if rest or times.bit_count() != 1 or times < 0:
            raise ValueError(f"blocks of {digest.block} samples")
        return digest

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {**vars(self), "blocks": list(self.blocks)}

    @property
    def text(self) -> str:
        """32 hex digits of all samples."""
        return _hash(b"".join(map(bytes.fromhex, self.blocks)), str(self.samples).encode())

    def coarser(self) -> "DataDigest":
        """The digest of blocks of twice as many samples."""
        pairs = (self.blocks[first : first + 2] for first in range(0, len(self.blocks), 2))
        joined = tuple(_hash(*map(bytes.fromhex, pair)) for pair in pairs)
        return DataDigest(self.samples, 2 * self.block, joined)

    def difference(self, then: "DataDigest") -> str | None:
        """From where on samples differ from those of ``then``, in words; None where none do."""
        ours, theirs = self, then
        while ours.block != theirs.block:
            if ours.block < theirs.block:
                ours = ours.coarser()
            else:
                theirs = theirs.coarser()
        if ours == theirs:
            return None
        unlike = (n for n, (a, b) in enumerate(zip(ours.blocks, theirs.blocks)) if a != b)  # noqa: B905
        first = next(unlike, min(len(ours.blocks), len(theirs.blocks))) * ours.block
        last = min(first + ours.block, max(ours.samples, theirs.samples))
        return (
            f"(was {then.samples:,} samples, now {self.samples:,}; the first difference is in "
            f"samples {first + 1:,} to {last:,})"
        )


@dataclass(frozen=True)
class DataIdentity:
    """What a run knows its data by, and the ``stored`` digest that it may have had in 0.3.0."""

    digest: DataDigest
    stored: Callable[[], str]

    def difference(self, then: object) -> str | None:
        """How what a checkpoint has differs, in words, or why that is not known; None: not at all.

        ``then`` is a digest as JSON, or the text that earlier versions kept.
        """
        if isinstance(then, str):
            return None if then == self.stored() else NOT_COMPARED
        try:
            return self.digest.difference(DataDigest.of(then))  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):
            return f"(was {then!a:.40}, now {self.digest.samples:,} samples)"


class BlockHasher:
    """Makes a :class:`DataDigest` of samples that come in parts of any size."""

    def __init__(self) -> None:
        self._samples, self._blocks = 0, []  # type: int, list[str]
        self._parts: dict[str, Any] = {}  # hashes of the fields of the block that is not full

    def update(self, fields: Mapping[str, Field]) -> None:
        """Add samples."""
        first, count = 0, min(len(offsets) for _, offsets in fields.values()) - 1
        while first < count:
            last = min(count, first + BLOCK - self._samples % BLOCK)
            for name, (values, offsets) in fields.items():
                part = self._parts.setdefault(name, hashlib.blake2b(digest_size=16))
                part.update(values[offsets[first] : offsets[last]].data)
            self._samples += last - first
            first = last
            if self._samples % BLOCK == 0:
                self._end_block()

    def digest(self) -> DataDigest:
        """Of all samples; none can be added afterwards."""
        if self._samples % BLOCK:
            self._end_block()
        digest = DataDigest(self._samples, BLOCK, tuple(self._blocks))
        while len(digest.blocks) > MOST:
            digest = digest.coarser()
        return digest

    def _end_block(self) -> None:
        parts = sorted(self._parts.items())
        self._blocks.append(_hash(*(name.encode() + part.digest() for name, part in parts)))
        self._parts = {}


def _hash(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
