"""Pictures with the runs of ids that stand for them in tokens."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from weakref import WeakValueDictionary

from dschat_lora.addons.images.pictures import Reference
from dschat_lora.data.media import FIRST_ID, MediaRun

# Of pictures that come one after another: those that are known though no run of them is held.
RECENT, RECENT_BYTES = 1024, 2**28
# Width, height and whether it is a sample's only picture, where the processor's tiles depend on it.
Shape = tuple[int, int, bool]


@dataclass(frozen=True)
class Expansion:
    """What the processor writes for pictures of a shape."""

    text: str  # in the place of its placeholder
    size: int  # image tokens in it
    grid: tuple[int, int]  # their rows and columns, for positions by a grid; else (0, 0)


@dataclass(frozen=True)
class Entry:
    """A picture with its run of ids."""

    reference: Reference  # by which it is found again, with the digest of its bytes
    shape: Shape
    first: int = 0
    size: int = 0
    grid: tuple[int, int] = (0, 0)

    @property
    def alone(self) -> bool:
        """Whether it is cut into tiles as a sample's only picture."""
        return self.shape[2]

    @property
    def name(self) -> str:
        """In a word or two: its file's, or its size."""
        path, (width, height, _) = self.reference.get("path"), self.shape
        return f"picture {Path(path).name if path else f'{width} x {height}'}"


class HeldRun(MediaRun):
    """A run with its entry, which is forgotten after it."""

    entry: Entry


class Passing:
    """Pictures that come one after another: they are known while a run is held, and a while after.

    Ids are not used twice. Copies begin anew.
    """

    def __init__(self) -> None:
        self._next = FIRST_ID
        self._held: WeakValueDictionary[int, Entry] = WeakValueDictionary()
        self._recent: OrderedDict[tuple[str, bool], Entry] = OrderedDict()

    def __reduce__(self) -> tuple[type["Passing"], tuple[()]]:
        return Passing, ()

    @property
    def entries(self) -> list[Entry]:
        """Those that are known, in the order of their ids."""
        return sorted(self._held.values(), key=attrgetter("first"))

    def find(self, digest: str, *, alone: bool) -> Entry | None:
        """The entry of a picture of these bytes, if it is known."""
        if (digest, alone) in self._recent:
            self._recent.move_to_end((digest, alone))
        return self._recent.get((digest, alone))

    def add(self, entry: Entry, known: Expansion) -> Entry:
        """The entry with ids; it is known from here on."""
        entry = replace(entry, first=self._next, size=known.size, grid=known.grid)
        self._next += known.size
        self._held[entry.first] = entry
        self._recent[entry.reference["digest"], entry.alone] = entry
        sizes = [len(each.reference.get("data", b"")) for each in self._recent.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if len(self._recent) <= RECENT and total <= RECENT_BYTES:
                break
            self._recent.popitem(last=False)
            total -= size
        return entry
