"""Rows with pictures as text with runs of token ids."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from mmap import ACCESS_READ, mmap
from operator import attrgetter
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.images.entries import Entry, Expansion, HeldRun, Passing, Shape
from dschat_lora.addons.images.families import FAMILIES, WITH_TORCHVISION, model_type
from dschat_lora.addons.images.options import ImageOptions
from dschat_lora.addons.images.pictures import (
    NO_PILLOW,
    Limits,
    Picture,
    PictureStore,
    digest,
    open_picture,
    picture_size,
    read,
)
from dschat_lora.addons.images.rows import with_pictures
from dschat_lora.config.data import DataConfig
from dschat_lora.data.media import FIRST_ID, MediaRun
from dschat_lora.data.messages import IMAGES, is_there
from dschat_lora.data.readers import RawRow, RowError, iter_rows
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import ParsedRow, RowOptions, parse_row, row_options
from dschat_lora.data.sources import DataSource, data_suffix
from dschat_lora.data.workers import map_in_order

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import nn

    from dschat_lora.addons.images.processors import PictureProcessor
    from dschat_lora.addons.images.vision import PictureInputs
    from dschat_lora.data.chat import Chat
    from dschat_lora.data.encoder import Tokenizer

INDEX = "pictures.json"
MOST_NAMED = 10_000  # in a checkpoint
LAST_ID = 2**31  # tokens are stored in 32 bits
SHAPES_AT_ONCE = 64  # that one process expands in a second or two
RECENT_SHAPES = 4096  # known of pictures that come one after another
# Most of a request: pictures, and bytes of one.
REQUEST_PICTURES, REQUEST_BYTES = 64, 2**25
_DECODING = Lock()  # one of many requests' pictures at a time, as they may be large


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
    refusal: str = ""  # of rows with pictures, where an option is for text alone
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
        from dschat_lora.addons.images.processors import PictureProcessor

        assert self.tokenizer is not None
        return PictureProcessor(self.base, self.tokenizer)

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
        digests = [entry.reference["digest"] for entry in self.entries]
        if len(digests) > MOST_NAMED:
            return {"pictures and their processor": self.digest}
        names = (Path(entry.reference.get("path", "within a row")).name for entry in self.entries)
        pairs = enumerate(zip(names, digests, strict=True), 1)
        described = json.dumps(self.processor.described(), sort_keys=True)
        read_by = {"the processor": digest(described.encode())[:8]}
        return read_by | {f"picture {n}, {name}": each[:8] for n, (name, each) in pairs}

    def summary(self) -> str:
        """That it takes pictures, and the backend of its processor."""
        kind = model_type(self.base)
        backend = "PIL" if kind in FAMILIES else "torchvision" if kind in WITH_TORCHVISION else ""
        return f"pictures, by a processor with {backend}" if backend else ""

    def row(
        self, values: Mapping[str, Any], fields: Sequence[str], folder: Path | None
    ) -> dict[str, Any]:
        """The row in one form: its pictures as ``images``, in the order of its text."""
        made = with_pictures(dict(values), fields, folder, allow_urls=self.options.allow_image_urls)
        if self.refusal and self.tokenizer is None and "images" in made:
            raise ValueError(self.refusal)
        if folder is None and "images" in made:
            if (count := len(made["images"])) > REQUEST_PICTURES:
                raise ValueError(f"{count} pictures exceed the limit of {REQUEST_PICTURES}")
            made["images"] = tuple(map(self._received, made["images"]))
        return made

    def _received(self, picture: Picture) -> Picture:
        """A picture of a request with its bytes and size."""
        data = read(picture, replace(self.limits, max_bytes=REQUEST_BYTES))
        with _DECODING:
            return Picture(data=data, size=open_picture(data, self.limits, picture).size)

    def scan(self, config: DataConfig, sources: Sequence[DataSource]) -> str | None:
        """A digest of all pictures and of what reads them; None where there are none."""
        self.entries, self._numbers, self._sound = [], {}, set()
        of_rows = hashlib.blake2b(digest_size=16)  # which rows have which pictures
        for values in _usable(sources, row_options(config, self)):
            pictures = values.get("images", ())
            numbers = [self._find(each, alone=len(pictures) == 1) for each in pictures]
            of_rows.update(json.dumps(numbers).encode())
        if not self._numbers:
            return None
        if self.refusal:
            raise ValueError(self.refusal)
        known = [[each.reference["digest"], each.shape] for each in self.entries]
        facts = [known, of_rows.hexdigest(), self.processor.described()]
        text = json.dumps(facts, sort_keys=True)
        self.digest = digest(text.encode())
        return self.digest

    def number(self, folder: Path, *, workers: int = 1) -> None:
        """Give each picture its run of ids, and keep what is known of them."""
        shapes = list(dict.fromkeys(entry.shape for entry in self.entries))
        few = len(shapes) < SHAPES_AT_ONCE
        expanded = map_in_order(self._expand_or_reason, shapes, workers=1 if few else workers)
        made = dict(zip(shapes, expanded, strict=True))
        for where, number in self._numbers.items():
            if isinstance(number, int):
                entry = self.entries[number]
                if isinstance(reason := made[entry.shape], str):
                    self._numbers[where] = f"{entry.name}: {reason}"
        none = Expansion("", 0, (0, 0))  # of a shape that is refused by its row
        self._expansions = {
            shape: none if isinstance(each, str) else each for shape, each in made.items()
        }
        self._append_all()
        kept = [[*shape, *astuple(each)] for shape, each in self._expansions.items()]
        (folder / INDEX).write_text(json.dumps(kept), encoding="utf-8")

    def read(self, folder: Path) -> None:
        """Give the pictures that were scanned the runs that were kept."""
        kept = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self._expansions = {
            (width, height, alone): Expansion(text, size, tuple(grid))
            for width, height, alone, text, size, grid in kept
        }
        self._append_all()

    def insert(
        self, texts: Sequence[str], values: Mapping[str, Any], *, whole: bool
    ) -> tuple[list[str], tuple[MediaRun, ...]]:
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
                f"it {count} times {token!r}, the placeholder of a picture"
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

    def fill(self, records: tuple[TextRecord, ...], row: ParsedRow) -> tuple[TextRecord, ...]:
        """The records of a row with its pictures in their places."""
        made = []
        for record in records:
            texts, whole = [span.text for span in record.spans], record is records[-1]
            try:
                texts, runs = self.insert(texts, row.values, whole=whole)
            except ValueError as error:
                raise RowError(row.location, str(error)) from error
            pairs = zip(record.spans, texts, strict=True)
            spans = tuple(span._replace(text=text) for span, text in pairs)
            made.append(record._replace(spans=spans, media=runs))
        return tuple(made)

    def record_of(
        self, location: str, prompt: object, images: Sequence[str], chat: "Chat"
    ) -> TextRecord:
        """The record of a prompt, text or messages, with pictures in front or in their places."""
        if isinstance(prompt, str) and "<image>" not in prompt:
            prompt = "<image>" * len(images) + prompt
        raw = RawRow(location, {"prompt": prompt, "images": list(images)})
        return to_records(parse_row(raw, RowOptions(media=self)), chat, "prompts")[-1]

    def _run(self, entry: Entry) -> MediaRun:
        if self._entries:  # of data, whose entries stay
            return MediaRun(entry.first, entry.size, self.token_id)
        run = HeldRun(entry.first, entry.size, self.token_id)
        run.entry = entry
        return run

    def shown(self, text: str, runs: Sequence[MediaRun]) -> str:
        """The text with the name of each picture in place of its tokens."""
        for run in runs:
            entry = self.entry_of(run.first)
            text = text.replace(self._expanded(entry.shape).text, f"[{entry.name}]", 1)
        return text

    def tokens(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Text and place of each token; of a picture's, as many as follow each other, together."""
        texts: list[tuple[str, int]] = []
        assert self.tokenizer is not None
        for place, token in enumerate(ids):
            if token < FIRST_ID:
                texts.append((self.tokenizer.decode([token]), place))
                continue
            entry = self.entry_of(token)
            if token != entry.first and place and ids[place - 1] == token - 1:
                continue
            rest, end = enumerate(ids[place:]), entry.first + entry.size
            count = next((n for n, i in rest if i != token + n or i >= end), len(ids) - place)
            part = "" if count == entry.size else f" of {entry.size}"
            texts.append((f"[{entry.name}, {count}{part} tokens]", place))
        return texts

    def plain(self, ids: Sequence[int]) -> list[int]:
        """The ids with the image token in the place of each of a picture."""
        return [self.token_id if token >= FIRST_ID else token for token in ids]

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

    def restored(
        self, rows: Sequence[Mapping[str, Any]], prompts: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Such columns with the pictures of each row's prompt; equal rows of a prompt share it."""
        made: dict[tuple[Any, ...], dict[str, Any]] = {}
        keys = [(*ids, str(columns)) for columns, ids in zip(rows, prompts, strict=True)]
        for key, columns, ids in zip(keys, rows, prompts, strict=True):
            if key not in made:
                made[key] = self._restored(columns, ids)
        return [made[key] for key in keys]

    def _restored(self, columns: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
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
        begin = {entry.first: entry for entry in self.entries}
        return [begin[i] for i in ids if i in begin]

    def picture(self, entry: Entry) -> "Image":
        """The picture of an entry, decoded.

        Raises:
            ValueError: if its file has changed since.
        """
        return open_picture(self.store.load(dict(entry.reference), self.limits), self.limits)

    def attach(self, model: "nn.Module", base: str | None = None) -> None:
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

    def _append_all(self) -> None:
        entries, self.entries = self.entries, []
        for entry in entries:
            self._append(entry)

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

    def _expand_or_reason(self, shape: Shape) -> Expansion | str:
        try:
            return self._expand(shape)
        except ValueError as error:  # a processor's, as of Qwen's for a line of pixels
            return str(error)

    def _expand(self, shape: Shape) -> Expansion:
        text, grid = self.processor.expansion(shape[:2], shape[2])
        return Expansion(text, text.count(self.processor.image_token), grid)


def _usable(sources: Sequence[DataSource], options: RowOptions) -> Iterator[dict[str, Any]]:
    """The rows of all sources, but for those that are refused where they are read."""
    for source in sources:
        files = source.files if source.rows is None and not options.columns else ()
        if files and not any(map(_names_images, files)):
            continue  # as of text alone, which may be much
        for row in iter_rows(source):
            values = {}  # in place of a row that is refused where it is read
            with suppress(RowError):
                values = parse_row(row, options).values
            yield values


def _names_images(file: Path) -> bool:
    """False where a file of text has not the word that columns and parts of images have."""
    if data_suffix(file) not in (".jsonl", ".json", ".csv", ".txt") or not file.stat().st_size:
        return True
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:
        return content.find(b"image") >= 0


def _named(value: object) -> str:
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
    given = iter([{"type": "image", "image": each} for each in islice(pictures, sum(places))])
    parts = [next(given, part) if at else part for part, at in zip(content, places, strict=True)]
    return {**message, "content": parts}
