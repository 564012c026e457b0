"""Rows with pictures as text with runs of token ids."""

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from operator import attrgetter
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dschat_lora.addons.images.families import FAMILIES, WITH_TORCHVISION, model_type
from dschat_lora.addons.images.options import ImageOptions
from dschat_lora.addons.images.pictures import (
    NO_PILLOW,
    Limits,
    Picture,
    PictureStore,
    Reference,
    digest,
    open_picture,
    picture_size,
    read,
)
from dschat_lora.addons.images.rows import with_pictures
from dschat_lora.data.media import FIRST_ID, Run
from dschat_lora.data.messages import IMAGES, is_there
from dschat_lora.data.workers import map_in_order

if TYPE_CHECKING:
    from PIL.Image import Image

    from dschat_lora.addons.images.processors import PictureProcessor
    from dschat_lora.addons.images.vision import PictureInputs
    from dschat_lora.data.encoder import Tokenizer

INDEX = "pictures.json"
MOST_NAMED = 10_000  # in a checkpoint
LAST_ID = 2**31  # tokens are stored in 32 bits
SHAPES_AT_ONCE = 64  # that one process expands in a second or two
# Of pictures that come one after another: those that are known though no run of them is held, and
# shapes.
RECENT, RECENT_BYTES, RECENT_SHAPES = 1024, 2**28, 4096
# Most of a request: pictures, and bytes of one.
REQUEST_PICTURES, REQUEST_BYTES = 64, 2**25
_DECODING = Lock()  # one of many requests' pictures at a time, as they may be large

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


class _HeldRun(Run):
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Passing, ()

    @property
    def entries(self) -> list[Entry]:
        """Those that are known, in the order of their ids."""
        found = (ref() for ref in self._held.valuerefs())
        return sorted((each for each in found if each is not None), key=lambda each: each.first)

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


@dataclass
class ImageReader:
    """Reads the pictures of rows for one model; see :class:`dschat_lora.data.media.MediaReader`.

    Attributes:
        digest: of the pictures that were scanned, and of all that reads them.
    """

    base: str
    tokenizer: "Tokenizer | None"
    options: ImageOptions
    store: PictureStore
    kind: str = "pictures"
    _entries: list[Entry] = field(default_factory=list)
    digest: str = ""
    towers: "dict[str, PictureInputs]" = field(
        default_factory=dict
    )  # by base, those that are frozen
    # Numbers of entries by where a picture is and by its bytes, or what is wrong with it.
    _numbers: dict[tuple[str, bool], int | str] = field(default_factory=dict)
    _expansions: dict[Shape, Expansion] = field(default_factory=dict)
    _sound: set[int] = field(default_factory=set)  # entries that were decoded once
    _passing: Passing = field(default_factory=Passing)  # where nothing was scanned

    @property
    def entries(self) -> list[Entry]:
        """The pictures that are known, in the order of their runs."""
        return self._entries or self._passing.entries or self._entries

    @entries.setter
    def entries(self, entries: list[Entry]) -> None:
        self._entries = entries

    def __deepcopy__(self, memo: object) -> "ImageReader":
        return self  # the decoders of a tokenizer's copies share it

    @cached_property
    def processor(self) -> "PictureProcessor":
        """The model's own."""
        if find_spec("PIL") is None:
            raise ValueError(NO_PILLOW)
        from dschat_lora.addons.images.processors import load_processor

        assert self.tokenizer is not None
        return load_processor(self.base, self.tokenizer)

    @property
    def token_id(self) -> int:
        """The token that features take the place of."""
        return self.processor.image_token_id

    @property
    def placeholder(self) -> str:
        """What the chat template writes for a picture."""
        return self.processor.placeholder

    @property
    def limits(self) -> Limits:
        """Of what is read."""
        return Limits(max_pixels=self.options.max_image_pixels)

    @property
    def facts(self) -> Mapping[str, str]:
        """By what library pictures become tensors."""
        return {"pictures read by": self.processor.backend}

    @property
    def identity(self) -> Mapping[str, str]:
        """What pictures are read by, and a digest of each by its number and the name of its file.

        Of more than ``MOST_NAMED`` it is one of all.
        """
        described = json.dumps(self.processor.described(), sort_keys=True)
        found = {"the processor": digest(described.encode())[:8]}
        digests = [entry.reference["digest"] for entry in self.entries]
        if len(digests) > MOST_NAMED:
            return {"pictures and their processor": self.digest}
        names = (Path(entry.reference.get("path", "within a row")).name for entry in self.entries)
        pairs = enumerate(zip(names, digests, strict=True), 1)
        return found | {f"picture {n}, {name}": each[:8] for n, (name, each) in pairs}

    def summary(self) -> str:
        """That it takes pictures, and the backend of its processor."""
        kind = model_type(self.base)
        backend = "PIL" if kind in FAMILIES else "torchvision" if kind in WITH_TORCHVISION else ""
        return f"pictures, by a processor with {backend}" if backend else ""

    def row(
        self, values: dict[str, Any], fields: Sequence[str], folder: Path | None
    ) -> dict[str, Any]:
        """The row in one form: its pictures as ``images``, in the order of its text."""
        made = with_pictures(values, fields, folder, allow_urls=self.options.allow_image_urls)
        if folder is None and "images" in made:
            if (count := len(made["images"])) > REQUEST_PICTURES:
                raise ValueError(f"{count} pictures are more than {REQUEST_PICTURES}")
            made["images"] = tuple(map(self._received, made["images"]))
        return made

    def _received(self, picture: Picture) -> Picture:
        """A picture of a request with its bytes and size."""
        data = read(picture, replace(self.limits, max_bytes=REQUEST_BYTES))
        with _DECODING:
            return Picture(data=data, size=open_picture(data, self.limits, picture).size)

    def scan(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """A digest of all pictures and of what reads them; None where there are none."""
        self.entries, self._numbers, self._sound = [], {}, set()
        for values in rows:
            pictures = values.get("images", ())
            for picture in pictures:
                self._find(picture, alone=len(pictures) == 1)
        if not self._numbers:
            return None
        known = [[each.reference["digest"], each.shape] for each in self.entries]
        wrong = [text for text in self._numbers.values() if isinstance(text, str)]
        text = json.dumps([known, wrong, self.processor.described()], sort_keys=True)
        self.digest = digest(text.encode())
        return self.digest

    def number(self, folder: Path, *, workers: int = 1) -> None:
        """Give each picture its run of ids, and keep what is known of them."""
        shapes = list(dict.fromkeys(entry.shape for entry in self.entries))
        few = len(shapes) < SHAPES_AT_ONCE
        made = map_in_order(self._expand, shapes, workers=1 if few else workers)
        self._expansions = dict(zip(shapes, made, strict=True))
        entries, self.entries = self.entries, []
        for entry in entries:
            self._append(entry)
        kept = {
            "entries": [[each.reference, each.shape] for each in self.entries],
            "expansions": [[*shape, *astuple(each)] for shape, each in self._expansions.items()],
        }
        (folder / INDEX).write_text(json.dumps(kept), encoding="utf-8")

    def read(self, folder: Path) -> None:
        """Take the runs that were kept in ``folder``."""
        kept = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self._expansions = {
            (width, height, alone): Expansion(text, size, tuple(grid))
            for width, height, alone, text, size, grid in kept["expansions"]
        }
        self.entries = []
        for reference, shape in kept["entries"]:
            self._append(Entry(reference, tuple(shape)))

    def insert(
        self, texts: Sequence[str], values: Mapping[str, Any], *, whole: bool
    ) -> tuple[list[str], tuple[Run, ...]]:
        """Texts with the tokens of each picture in place of its placeholder, and their runs."""
        if not (pictures := values.get("images", ())):
            return list(texts), ()
        processor = self.processor
        if isinstance(values.get("prompt", values.get("text")), str):
            texts = [text.replace("<image>", processor.placeholder) for text in texts]
        token, count = processor.token, sum(text.count(processor.token) for text in texts)
        if count > len(pictures) or (whole and count < len(pictures)):
            raise ValueError(
                f"the row has {len(pictures)} pictures, and its text as the chat template writes "
                f"it {count} times {token!r}, which stands for one"
            )
        own = processor.image_token
        if own != token and any(own in text for text in texts):
            raise ValueError(f"the text has {own!r}, which stands for features of pictures")
        entries = [self._entry(each, alone=len(pictures) == 1) for each in pictures[:count]]
        expansions = iter([self._expanded(entry.shape).text for entry in entries])
        made = []
        for text in texts:
            first, *rest = text.split(token)
            made.append(first + "".join(next(expansions) + part for part in rest))
        return made, tuple(map(self._run, entries))

    def _run(self, entry: Entry) -> Run:
        if self._entries:  # of data, whose entries stay
            return Run(entry.first, entry.size)
        run = _HeldRun(entry.first, entry.size)
        run.entry = entry
        return run

    def shown(self, text: str, runs: Sequence[Run]) -> str:
        """The text with the name of each picture in place of its tokens."""
        for run in runs:
            entry = self.entry_of(run.first)
            text = text.replace(self._expanded(entry.shape).text, f"[{entry.name}]", 1)
        return text

    def describe(self, token: int) -> tuple[str, Run]:
        """The name of the picture that a token is of, and its run."""
        entry = self.entry_of(token)
        return entry.name, Run(entry.first, entry.size)

    def columns(self, values: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row as JSON holds them: pictures by their paths, messages as read."""
        if not row.get("images"):
            return dict(values)
        read = {name: row[name] for name in values if name in row and name not in IMAGES}
        named = {
            name: [*map(_named, held)] if isinstance(held, list | tuple) else _named(held)
            for name, held in values.items()
            if name in IMAGES and is_there(held)
        }
        return {**values, **read, **named}

    def restored(self, columns: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """Such columns with the pictures of the row's prompt, decoded, as TRL has them.

        They are in the messages, all of which have parts, and in ``images`` or ``image``.
        """
        pictures = [self.picture(entry) for entry in self.entries_of(ids)]
        made, rest = dict(columns), iter(pictures)
        for name in ("prompt", "messages"):
            if pictures and isinstance(messages := columns.get(name), list):
                made[name] = [_with_parts(message, rest) for message in messages]
        for name in IMAGES:
            held = columns.get(name)
            if isinstance(held, list) and len(held) == len(pictures):
                made[name] = pictures
            elif isinstance(held, str) and len(pictures) == 1:
                made[name] = pictures[0]
        return made

    def described(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Digest and path of each picture."""
        return [dict(entry.reference) for entry in self.entries_of(ids)]

    def entry_of(self, number: int) -> Entry:
        """That of the picture whose run has an id."""
        entries = self.entries
        return entries[bisect_right(entries, number, key=attrgetter("first")) - 1]

    def entries_of(self, ids: Sequence[int]) -> list[Entry]:
        """Those of all pictures in a text, in order."""
        found = [(i, self.entry_of(i)) for i in ids if i >= FIRST_ID]
        return [entry for i, entry in found if i == entry.first]

    def picture(self, entry: Entry) -> "Image":
        """The picture of an entry, decoded.

        Raises:
            ValueError: if its file has changed since.
        """
        return open_picture(self.store.load(dict(entry.reference), self.limits), self.limits)

    def attach(self, model: Any, base: str | None = None) -> None:
        """Have a language model take the pictures; its tower is loaded if it has none."""
        from dschat_lora.addons.images.vision import attach

        attach(model, self, base or self.base)

    def _find(self, picture: Picture, *, alone: bool) -> int | str:
        """The number of a picture's entry, which it gets if it is new, or what is wrong with it."""
        alone = alone and self.processor.counts_pictures
        where = picture.path or picture.url
        if where and (where, alone) in self._numbers:
            return self._numbers[where, alone]
        number: int | str
        try:
            data = read(picture, self.limits)
            name = digest(data)
            number = self._numbers.get((name, alone), len(self.entries))
            if number == len(self.entries):
                shape = *picture_size(data, self.limits, picture), alone
                self.entries.append(Entry(self.store.put(picture, data), shape))
        except ValueError as error:
            number, name = str(error), where
        self._numbers[name, alone] = self._numbers[where or name, alone] = number
        return number

    def _entry(self, picture: Picture, *, alone: bool) -> Entry:
        if not self._numbers:
            return self._passing_entry(picture, alone=alone and self.processor.counts_pictures)
        number = self._find(picture, alone=alone)
        if isinstance(number, str):
            raise ValueError(number)
        if not self.entries[number].size:
            new = self.entries.pop()
            self._expanded(new.shape)
            self._append(new)
        entry = self.entries[number]
        if number not in self._sound:  # decoded here, where what is broken is known by its row
            open_picture(self.store.load(entry.reference, self.limits), self.limits, picture)
            self._sound.add(number)
        return entry

    def _passing_entry(self, picture: Picture, *, alone: bool) -> Entry:
        data = read(picture, self.limits)
        if (entry := self._passing.find(digest(data), alone=alone)) is None:
            size = picture.size or open_picture(data, self.limits, picture).size
            entry = Entry(self.store.put(picture, data), (*size, alone))
            entry = self._passing.add(entry, self._expanded(entry.shape))
        return entry

    def _append(self, entry: Entry) -> None:
        """Give an entry the ids after those of the last one."""
        first = self.entries[-1].first + self.entries[-1].size if self.entries else FIRST_ID
        known = self._expansions[entry.shape]
        if first + known.size > LAST_ID:
            raise ValueError(f"the data has more than {LAST_ID - FIRST_ID:,} tokens of pictures")
        self.entries.append(replace(entry, first=first, size=known.size, grid=known.grid))

    def _expanded(self, shape: Shape) -> Expansion:
        if shape not in self._expansions:
            if len(self._expansions) >= RECENT_SHAPES and not self._numbers:
                self._expansions.clear()
            self._expansions[shape] = self._expand(shape)
        return self._expansions[shape]

    def _expand(self, shape: Shape) -> Expansion:
        text, grid = self.processor.expansion(shape[:2], shape[2])
        return Expansion(text, text.count(self.processor.image_token), grid)


@dataclass
class RunDecoder:
    """``decode`` of a tokenizer that reads a run, or a tile of it, as one image token."""

    tokenizer: Any
    reader: ImageReader

    def __deepcopy__(self, memo: object) -> "RunDecoder":
        return self

    def __call__(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        """As the tokenizer's own."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, list | tuple):
            pairs = zip(ids, [-1, *ids][: len(ids)], strict=True)
            ids = [self._shown(i) for i, last in pairs if not self._goes_on(i, last)]
        return type(self.tokenizer).decode(self.tokenizer, ids, *args, **options)

    def _shown(self, number: int) -> int:
        return self.reader.token_id if number >= FIRST_ID else number

    def _goes_on(self, number: int, last: int) -> bool:
        """Whether an id is of the picture whose id stands before it."""
        is_next = number > FIRST_ID and number == last + 1
        return is_next and self.reader.entry_of(number).first != number


def _named(value: Any) -> str:
    """A picture of a column by its path or address; others have none."""
    if isinstance(value, Mapping):
        value = value.get("path") or value.get("url")
    name = str(value) if isinstance(value, str | PathLike) else ""
    return name if name and not name.startswith("data:") and len(name) < 1000 else "(picture)"


def _with_parts(message: Mapping[str, Any], pictures: Iterator[Any]) -> dict[str, Any]:
    """A message in parts, of which pictures get the next ones, as far as there are any."""
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return dict(message)
    places = [isinstance(part, dict) and part.get("type") == "image" for part in content]
    found = list(islice(pictures, sum(places)))
    given = iter([{"type": "image", "image": each} for each in found])
    parts = [next(given, part) if at else part for part, at in zip(content, places, strict=True)]
    return {**message, "content": parts}
