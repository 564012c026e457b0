"""Rows with pictures as text with runs of token ids."""

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dschat_lora.addons.images.families import FAMILIES, WITH_TORCHVISION
from dschat_lora.addons.images.options import ImageOptions
from dschat_lora.addons.images.pictures import (
    Limits,
    Picture,
    PictureStore,
    digest,
    open_picture,
    read,
)
from dschat_lora.addons.images.rows import with_pictures
from dschat_lora.data.media import FIRST_ID, Run
from dschat_lora.runtime.checks import cache_directory

if TYPE_CHECKING:
    from PIL.Image import Image

    from dschat_lora.addons.images.processors import PictureProcessor
    from dschat_lora.data.encoder import Tokenizer

INDEX = "pictures.json"
# Of pictures that come one after another, those that are known though no run of them is held.
RECENT, RECENT_BYTES = 1024, 2**28
# Most of a request: pictures, and bytes of one.
REQUEST_PICTURES, REQUEST_BYTES = 64, 2**25
_DECODING = Lock()  # one of many requests' pictures at a time, as they may be large


@dataclass(frozen=True)
class Entry:
    """A picture with its run of ids.

    Some processors cut a picture into more tiles where it is a sample's only one: ``alone``.
    """

    reference: Mapping[str, Any]  # by which it is found again, with the digest of its bytes
    width: int
    height: int
    alone: bool
    first: int = 0
    size: int = 0  # tokens
    expansion: str = ""  # the text that is tokenised in place of its placeholder
    grid: tuple[int, int] = (0, 0)  # rows and columns of its tokens, for positions by a grid

    @property
    def name(self) -> str:
        """In a word or two: its file's, or its size."""
        path = self.reference.get("path")
        return f"picture {Path(path).name if path else f'{self.width} x {self.height}'}"


# Of a picture: where it lies, or what its bytes are.
Key = tuple[str, bool]


class _HeldRun(Run):
    """A run with its entry, which is forgotten after it."""

    entry: Entry


class Passing:
    """Pictures that come one after another: they are known while a run is held, and a while after.

    Ids are not used twice. Copies begin anew.
    """

    def __init__(self) -> None:
        self.least = self.first = FIRST_ID  # id of all, and of the next one
        self._held: WeakValueDictionary[int, Entry] = WeakValueDictionary()
        self._recent: OrderedDict[Key, Entry] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return Passing, ()

    def begin(self, first: int) -> None:
        """Number from ``first`` on."""
        self.least = self.first = first

    @property
    def entries(self) -> list[Entry]:
        """Those that are known, in the order of their ids."""
        found = (ref() for ref in self._held.valuerefs())
        return sorted((each for each in found if each is not None), key=lambda each: each.first)

    def find(self, key: Key) -> Entry | None:
        """The entry of a key, if it is known."""
        if key in self._recent:
            self._recent.move_to_end(key)
        return self._recent.get(key)

    def add(self, key: Key, entry: Entry) -> None:
        """Know another one, whose ids begin with ``first``."""
        self.first += entry.size
        self._held[entry.first] = self._recent[key] = entry
        sizes = [len(each.reference.get("data", b"")) for each in self._recent.values()]
        total = sum(sizes)
        for size in sizes[:-1]:
            if len(self._recent) <= RECENT and total <= RECENT_BYTES:
                break
            self._recent.popitem(last=False)
            total -= size


@dataclass
class ImageReader:
    """Reads the pictures of rows for one model; see :class:`dschat_lora.data.media.MediaReader`."""

    base: str
    tokenizer: "Tokenizer | None"
    options: ImageOptions
    store: PictureStore
    _entries: list[Entry] = field(default_factory=list)  # of data that was scanned
    _numbers: dict[Key, int | str] = field(default_factory=dict)  # or what is wrong with it
    kind: str = "pictures"
    _passing: Passing = field(default_factory=Passing)

    @property
    def entries(self) -> list[Entry]:
        """The pictures that are known, in the order of their ids."""
        return [*self._entries, *self._passing.entries]

    @cached_property
    def processor(self) -> "PictureProcessor":
        """The model's own."""
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

    def summary(self) -> str:
        """That it takes pictures, and the backend of its processor."""
        kind = model_type(self.base)
        backend = "PIL" if kind in FAMILIES else "torchvision" if kind in WITH_TORCHVISION else ""
        return f"pictures, by a processor with {backend}" if backend else ""

    def scan(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """A digest of all pictures and of what reads them; None where there are none."""
        self._entries, self._numbers = [], {}
        for values in rows:
            pictures = values.get("images", ())
            for picture in pictures:
                self._find(picture, alone=len(pictures) == 1)
        if not self._numbers:
            return None
        known = [[each.reference["digest"], each.alone] for each in self._entries]
        wrong = [text for text in self._numbers.values() if isinstance(text, str)]
        text = json.dumps([known, wrong, self.processor.described()], sort_keys=True)
        return digest(text.encode())

    def number(self, folder: Path) -> None:
        """Give each picture its run of ids, and keep what is known of it."""
        first, entries = FIRST_ID, list[Entry]()
        for entry in self._entries:
            entries.append(self._with_run(entry, first))
            first += entries[-1].size
        self._entries = entries
        self._passing.begin(first)
        text = json.dumps([asdict(entry) for entry in entries])
        (folder / INDEX).write_text(text, encoding="utf-8")

    def read(self, folder: Path) -> None:
        """Take the runs that were kept in ``folder``."""
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self._entries = [Entry(**{**each, "grid": tuple(each["grid"])}) for each in found]
        self._passing.begin(FIRST_ID + sum(each.size for each in self._entries))

    def insert(
        self, texts: Sequence[str], values: Mapping[str, Any], *, whole: bool
    ) -> tuple[list[str], tuple[Run, ...]]:
        """Texts with the tokens of each picture in place of its placeholder, and their runs."""
        pictures, processor = values.get("images", ()), self.processor
        if not pictures:
            return list(texts), ()
        if isinstance(values.get("prompt", values.get("text")), str):
            texts = [text.replace("<image>", processor.placeholder) for text in texts]
        token, count = processor.token, sum(text.count(processor.token) for text in texts)
        if count > len(pictures) or (whole and count < len(pictures)):
            raise ValueError(
                f"the row has {len(pictures)} pictures, and its text as the chat template writes "
                f"it {count} times {token!r}, which stands for one"
            )
        entries = [self._entry(each, alone=len(pictures) == 1) for each in pictures[:count]]
        expansions = iter([entry.expansion for entry in entries])
        made = []
        for text in texts:
            first, *rest = text.split(token)
            made.append(first + "".join(next(expansions) + part for part in rest))
        return made, tuple(map(self._run, entries))

    def shown(self, text: str, runs: Sequence[Run]) -> str:
        """The text with the name of each picture in place of its tokens."""
        for run in runs:
            entry = self._of(run.first)
            text = text.replace(entry.expansion, f"[{entry.name}]", 1)
        return text

    def describe(self, token: int) -> tuple[str, Run]:
        """The name of the picture that a token is of, and its run."""
        entry = self._of(token)
        return entry.name, Run(entry.first, entry.size)

    def _of(self, token: int) -> Entry:
        entries = self.entries
        return entries[bisect_right(entries, token, key=lambda each: each.first) - 1]

    def picture(self, entry: Entry) -> "Image":
        """The picture of an entry, decoded.

        Raises:
            ValueError: if its file has changed since.
        """
        return open_picture(self.store.load(entry.reference, self.limits), self.limits)

    def attach(self, model: Any) -> None:
        """Have a language model take the pictures; its tower is loaded if it has none."""
        from dschat_lora.addons.images.vision import attach

        attach(model, self)

    def _key(self, picture: Picture, *, alone: bool) -> Key:
        where = picture.path or picture.url or digest(read(picture, self.limits))
        return where, alone and self.processor.counts_pictures

    def _find(self, picture: Picture, *, alone: bool) -> None:
        key = self._key(picture, alone=alone)
        if key in self._numbers:
            return
        try:
            data = read(picture, self.limits)
            width, height = open_picture(data, self.limits, picture).size
        except ValueError as error:
            self._numbers[key] = str(error)
            return
        reference = self.store.put(picture, data)
        self._numbers[key] = len(self._entries)
        self._entries.append(Entry(reference, width, height, key[1]))

    def _entry(self, picture: Picture, *, alone: bool) -> Entry:
        number = self._numbers.get(self._key(picture, alone=alone)) if self._numbers else None
        if isinstance(number, str):
            raise ValueError(number)
        if number is not None:
            return self._entries[number]
        data = read(picture, self.limits)
        key = digest(data), alone and self.processor.counts_pictures
        if (entry := self._passing.find(key)) is None:
            width, height = picture.size or open_picture(data, self.limits, picture).size
            entry = Entry(self.store.put(picture, data), width, height, key[1])
            entry = self._with_run(entry, self._passing.first)
            self._passing.add(key, entry)
        return entry

    def _run(self, entry: Entry) -> Run:
        if entry.first < self._passing.least:  # of data, whose entries stay
            return Run(entry.first, entry.size)
        run = _HeldRun(entry.first, entry.size)
        run.entry = entry
        return run

    def _with_run(self, entry: Entry, first: int) -> Entry:
        expansion, grid = self.processor.expansion((entry.width, entry.height), entry.alone)
        size = expansion.count(self.processor.image_token)
        return replace(entry, first=first, size=size, expansion=expansion, grid=grid)


def image_reader(config: Any, tokenizer: "Tokenizer | None", base: str) -> ImageReader | None:
    """What reads pictures for the model at ``base``; None where it sees none.

    Without a tokenizer it reads rows alone.
    """
    kind = model_type(base)
    if kind is not None and kind not in FAMILIES and kind not in WITH_TORCHVISION:
        return None
    options = getattr(getattr(config, "addons", None), "images", None)
    if config is None:
        options = ImageOptions()
    if options is None:  # of a command that reads no pictures
        return None
    data = getattr(config, "data", None)  # a verb that prepares none has pictures in memory
    data = getattr(data, "data", data)
    store = PictureStore(None if data is None else cache_directory(data) / "pictures")
    reader = ImageReader(base, tokenizer, options, store)
    if tokenizer is not None:
        tokenizer.decode = RunDecoder(tokenizer, reader)  # type: ignore[method-assign]
    return reader


@dataclass
class RunDecoder:
    """``decode`` of a tokenizer that reads an id of a run as the token that stands for pictures."""

    tokenizer: Any
    reader: ImageReader

    def __deepcopy__(self, memo: object) -> "RunDecoder":
        return self

    def __call__(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        """As the tokenizer's own."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, list | tuple):
            ids = [self.reader.token_id if i >= FIRST_ID else i for i in ids]
        return type(self.tokenizer).decode(self.tokenizer, ids, *args, **options)


def model_type(base: str) -> str | None:
    """The type of a model by its ``config.json``; None where that is not on this machine."""
    path = Path(base) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        found = None if Path(base).is_absolute() else try_to_load_from_cache(base, "config.json")
        if not isinstance(found, str):
            return None
        path = Path(found)
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
