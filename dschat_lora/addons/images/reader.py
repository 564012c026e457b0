"""Rows with pictures as text with runs of token ids."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
MOST_NAMED = 10_000  # in a checkpoint


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


# Of a picture: where it lies, or what its bytes are.
Key = tuple[str, bool]


@dataclass
class ImageReader:
    """Reads the pictures of rows for one model; see :class:`dschat_lora.data.media.MediaReader`."""

    base: str
    tokenizer: "Tokenizer | None"
    options: ImageOptions
    store: PictureStore
    entries: list[Entry] = field(default_factory=list)
    _numbers: dict[Key, int | str] = field(default_factory=dict)  # or what is wrong with it

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
            return found | {"pictures": digest("".join(digests).encode())}
        names = (Path(entry.reference.get("path", "within a row")).name for entry in self.entries)
        pairs = enumerate(zip(names, digests, strict=True), 1)
        return found | {f"picture {n}, {name}": each[:8] for n, (name, each) in pairs}

    def row(self, values: dict[str, Any], fields: Sequence[str], folder: Path) -> dict[str, Any]:
        """The row in one form: its pictures as ``images``, in the order of its text."""
        return with_pictures(values, fields, folder, allow_urls=self.options.allow_image_urls)

    def scan(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """A digest of all pictures and of what reads them; None where there are none."""
        self.entries, self._numbers = [], {}
        for values in rows:
            pictures = values.get("images", ())
            for picture in pictures:
                self._find(picture, alone=len(pictures) == 1)
        if not self._numbers:
            return None
        known = [[each.reference["digest"], each.alone] for each in self.entries]
        wrong = [text for text in self._numbers.values() if isinstance(text, str)]
        text = json.dumps([known, wrong, self.processor.described()], sort_keys=True)
        return digest(text.encode())

    def number(self, folder: Path) -> None:
        """Give each picture its run of ids, and keep what is known of it."""
        first, entries = FIRST_ID, list[Entry]()
        for entry in self.entries:
            entries.append(self._with_run(entry, first))
            first += entries[-1].size
        self.entries = entries
        text = json.dumps([asdict(entry) for entry in self.entries])
        (folder / INDEX).write_text(text, encoding="utf-8")

    def read(self, folder: Path) -> None:
        """Take the runs that were kept in ``folder``."""
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.entries = [Entry(**{**each, "grid": tuple(each["grid"])}) for each in found]

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
        return made, tuple(Run(entry.first, entry.size) for entry in entries)

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
        self._numbers[key] = len(self.entries)
        self.entries.append(Entry(reference, width, height, key[1]))

    def _entry(self, picture: Picture, *, alone: bool) -> Entry:
        key = self._key(picture, alone=alone)
        if key not in self._numbers:
            self._find(picture, alone=alone)
            if isinstance(number := self._numbers[key], int):
                last = self.entries[number - 1] if number else None
                first = FIRST_ID if last is None else last.first + last.size
                self.entries[number] = self._with_run(self.entries[number], first)
        number = self._numbers[key]
        if isinstance(number, str):
            raise ValueError(number)
        return self.entries[number]

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
    data = getattr(config.data, "data", config.data)
    folder = cache_directory(data) / "pictures"
    reader = ImageReader(base, tokenizer, config.addons.images, PictureStore(folder))
    if tokenizer is not None:
        tokenizer.decode = RunDecoder(tokenizer, reader.token_id)  # type: ignore[method-assign]
    return reader


@dataclass
class RunDecoder:
    """``decode`` of a tokenizer that reads an id of a run as the token that stands for pictures."""

    tokenizer: Any
    token_id: int

    def __call__(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        """As the tokenizer's own."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, list | tuple):
            ids = [self.token_id if i >= FIRST_ID else i for i in ids]
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
