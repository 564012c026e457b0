"""Pictures of rows: where they are, their bytes and pixels, and a store of those without a file."""

import base64
import hashlib
import io
import os
import re
import stat
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dschat_lora.config.data import DataConfig
from dschat_lora.data.messages import is_there
from dschat_lora.runtime.checks import cache_directory

if TYPE_CHECKING:
    from PIL import Image

# Of what Pillow reads, the formats of pixels that need no program beside it.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
# Base64 of how PNG, JPEG, GIF, WebP and TIFF begin.
_BASE64_BEGINS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "SUkqA", "TU0AK")
_FORMS = "a path, a data URI, bytes, {'bytes': ..., 'path': ...} or a PIL image"
# What Pillow raises for files that lie about themselves.
_BROKEN = (
    *(ArithmeticError, AttributeError, AssertionError, EOFError, LookupError, MemoryError),
    *(OSError, RuntimeError, SyntaxError, TypeError, ValueError, struct.error, zlib.error),
)
Reference = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What a picture may have."""

    max_pixels: int = 50_000_000
    max_bytes: int = 200_000_000  # of a file, or of the answer of a URL
    seconds: float = 30.0  # for the answer of a URL


LIMITS = Limits()
THUMBNAILS = 24  # most of a run
NO_PILLOW = "pictures need Pillow: pip install 'dschat_lora[images]'"
_ORIENTATION = 0x0112  # tag of EXIF; 5 to 8 are turned by a right angle


@dataclass(frozen=True)
class Picture:
    """A picture of a row that is not read yet; one of the four is given."""

    path: str = ""  # absolute
    data: bytes = field(default=b"", repr=False)  # as a file has it
    url: str = ""
    image: "Image.Image | None" = None
    size: tuple[int, int] | None = None  # width and height, if they are known

    def __str__(self) -> str:
        name = f"{self.path or self.url!r:.300}" if self.path or self.url else "in memory"
        return f"picture of {len(self.data):,} bytes" if self.data else f"picture {name}"


def picture_of(value: object, folder: str | Path | None, *, allow_urls: bool = False) -> Picture:
    """A picture as a row has it: a path, a URI, base64, bytes, an object with these, a PIL image.

    Paths are relative to ``folder``, that of the row's file. Text that is no file is base64 where
    it begins as that of a picture does. Of ``{"bytes": ..., "path": ...}`` the bytes count if there
    are any.

    Raises:
        ValueError: if it is none of these, a URL that is not allowed, or no file.
    """
    if isinstance(value, Mapping):
        for name in ("bytes", "base64", "data", "path", "url"):
            if is_there(held := value.get(name)):
                if isinstance(held, str) and name not in ("path", "url"):
                    held = _decoded(held)
                return picture_of(held, folder, allow_urls=allow_urls)
        raise ValueError(f"a picture must be {_FORMS}, found an object of {sorted(value)!s:.200}")
    if isinstance(value, bytes | bytearray) and value:
        return Picture(data=bytes(value))
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        return Picture(image=value)
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        given = repr(text) if isinstance(text, str | bytes) else type(value).__name__
        raise ValueError(f"a picture must be {_FORMS}, found {given}")
    return _of_text(text, folder, allow_urls)


def _of_text(text: str, folder: str | Path | None, allow_urls: bool) -> Picture:
    begin = re.match(r"(data):|([a-z][a-z0-9+.-]*)://", text, re.IGNORECASE)
    scheme = begin[begin.lastindex or 0].lower() if begin else ""
    if scheme == "data":
        head, _, body = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise ValueError(f"a data URI must have base64, found {head!r:.100}")
        return Picture(data=_decoded(body))
    if scheme in ("http", "https"):
        if not allow_urls:
            raise ValueError(f"picture {text!r:.300} is a URL; --allow_image_urls downloads it")
        return Picture(url=text)
    if scheme not in ("", "file"):
        raise ValueError(f"picture {text!r:.300} is not a file, data, http or https address")
    return _of_file(unquote(text[len("file://") :]) if scheme else text, folder)


def _of_file(name: str, folder: str | Path | None) -> Picture:
    if folder is None:
        if name.startswith(_BASE64_BEGINS):
            return Picture(data=_decoded(name))
        raise ValueError(f"picture {name!r:.100} must be a data URI; files are not read here")
    path = os.path.abspath(os.path.join(folder, os.path.expanduser(name)))
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # the latter for what can be no name
        if name.startswith(_BASE64_BEGINS):
            return Picture(data=_decoded(name))
        raise ValueError(f"picture {name!r:.300} in {str(folder)!r}: {_reason(error)}") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a device or the like"
        raise ValueError(f"picture {path!r:.300} is {kind}, no file")
    return Picture(path=path)


def _decoded(text: str) -> bytes:
    try:
        if data := base64.b64decode("".join(text.split()), validate=True):
            return data
    except ValueError as error:
        raise ValueError(f"a picture's base64 is broken ({error}): {text!r:.50}") from error
    raise ValueError("a picture's base64 is empty")


def read(picture: Picture, limits: Limits = LIMITS) -> bytes:
    """The encoded bytes of a picture; a PIL image's as PNG of what :func:`open_picture` gives.

    Raises:
        ValueError: naming it, if they cannot be read, are too many, or none.
    """
    data = picture.data
    with _reading(picture):
        if picture.image is not None:
            buffer = io.BytesIO()
            _upright(picture.image, limits).save(buffer, "PNG", compress_level=1)
            return buffer.getvalue()
        if picture.path:
            if not os.path.isfile(picture.path) and os.path.exists(picture.path):
                raise ValueError("it is not a file")
            with open(picture.path, "rb") as file:
                data = file.read(limits.max_bytes + 1)
        if picture.url:
            data = _fetched(picture.url, limits)
        if not data or len(data) > limits.max_bytes:
            raise ValueError(f"more than {limits.max_bytes:,} bytes" if data else "it is empty")
    return data


def _fetched(url: str, limits: Limits) -> bytes:
    import httpx  # as transformers fetches pictures

    end, data = time.monotonic() + limits.seconds, bytearray()
    try:
        with httpx.stream("GET", url, timeout=limits.seconds, follow_redirects=True) as answer:
            answer.raise_for_status()
            for part in answer.iter_bytes():
                data += part
                if time.monotonic() > end:
                    raise ValueError(f"the download takes more than {limits.seconds:g} seconds")
                if len(data) > limits.max_bytes:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(_reason(error)) from error
    return bytes(data)


def open_picture(
    data: bytes, limits: Limits = LIMITS, name: object = "the picture"
) -> "Image.Image":
    """The pixels of a picture, upright and in RGB, as ``load_image`` of transformers gives them.

    Of one that moves, it is the first frame. Pixels are counted before they are decoded.

    Raises:
        ValueError: beginning with ``name``, if it is no picture, broken or too large.
    """
    with _reading(name):
        return _upright(_opened(data), limits)


def picture_size(
    data: bytes, limits: Limits = LIMITS, name: object = "the picture"
) -> tuple[int, int]:
    """Width and height of what :func:`open_picture` gives, whose pixels are not decoded.

    Raises:
        ValueError: beginning with ``name``, if it is no picture or too large.
    """
    with _reading(name):
        image = _opened(data)
        _check_size(image, limits)
        turned = image.getexif().get(_ORIENTATION, 1) in range(5, 9)
        width, height = image.size
        return (height, width) if turned else (width, height)


def _opened(data: bytes) -> "Image.Image":
    from PIL import Image, UnidentifiedImageError

    # Pixels are counted here, before they are decoded.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    Image.init()
    formats = [each for each in FORMATS if each in Image.OPEN]  # some need a newer Pillow
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        head = data[:1000].lower()
        reason = f"it is not {', '.join(FORMATS)}; it begins with {data[:16]!r}"
        if head.startswith(b"version https://git-lfs"):
            reason = "it is a pointer of Git LFS; `git lfs pull` fetches the file itself"
        elif b"<svg" in head:
            reason = "it is SVG, which is not supported; convert it to PNG"
        raise ValueError(reason) from None
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ValueError(f"it has more than {most:,} pixels, the most of Pillow") from None


@contextmanager
def _reading(name: object) -> Iterator[None]:
    """What fails inside the block, as a line."""
    try:
        yield
    except ImportError as error:
        raise ValueError(NO_PILLOW) from error
    except _BROKEN as error:
        raise ValueError(f"{name}: {_reason(error)}") from error


def _upright(image: "Image.Image", limits: Limits) -> "Image.Image":
    from PIL import ImageOps

    _check_size(image, limits)
    made = ImageOps.exif_transpose(image).convert("RGB")
    made.info.clear()  # so that equal pixels are equal bytes of a PNG
    return made


def _check_size(image: "Image.Image", limits: Limits) -> None:
    width, height = image.size
    if not 0 < width * height <= limits.max_pixels:
        allowed = f"1 to {limits.max_pixels:,} are allowed (--max_image_pixels)"
        raise ValueError(f"it has {width:,} x {height:,} pixels; {allowed}")


def _reason(error: BaseException) -> str:
    """What an error says, in a line."""
    said = " ".join(str(getattr(error, "strerror", None) or error).split())
    return said[:200] or type(error).__name__


def digest(data: bytes) -> str:
    """32 hexadecimal digits, equal for equal bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class PictureStore:
    """Bytes of pictures by references, which samples keep; in a folder those that have no file.

    Without a folder references hold these.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def put(self, picture: Picture, data: bytes) -> Reference:
        """A reference to a picture of these bytes: its digest, and its path if it has one.

        Several processes may put the same ones.

        Raises:
            OSError: if the disk has no room for them.
        """
        name = digest(data)
        if picture.path:
            return {"digest": name, "path": picture.path}
        if self._folder is None:
            return {"digest": name, "data": data}
        path = self._path(name)
        # One that a failure of the power has cut is written again.
        if not path.is_file() or path.stat().st_size != len(data):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as staging:
                (Path(staging) / name).write_bytes(data)
                os.replace(Path(staging) / name, path)
        return {"digest": name}

    def load(self, reference: Mapping[str, Any], limits: Limits = LIMITS) -> bytes:
        """The bytes of a reference.

        Raises:
            ValueError: naming the file, if it is gone or has other bytes.
        """
        name = reference["digest"]
        if "data" in reference:
            return bytes(reference["data"])
        picture = Picture(path=reference.get("path") or str(self._path(name)))
        data = read(picture, limits)
        if digest(data) != name:
            raise ValueError(f"{picture} has changed since it was first read; prepare data again")
        return data

    def _path(self, name: str) -> Path:
        assert re.fullmatch(r"[0-9a-f]{32}", name)
        assert self._folder is not None, "bytes without a file are in the reference"
        return self._folder / name[:2] / name


def thumbnails(
    media: Sequence[Sequence[Mapping[str, Any]]], config: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Of each list of references the thumbnails of those that are there, ``THUMBNAILS`` in all."""
    made: dict[str, str | None] = {}
    for each in (each for own in media for each in own):
        if str(each) not in made and len(made) < THUMBNAILS:
            made[str(each)] = thumbnail(each, config)
    return [tuple(uri for each in own if (uri := made.get(str(each)))) for own in media]


def thumbnail(reference: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """A data URI of a few KB of a picture that a run saw; None where it is not there any more.

    ``config`` has the run's options by name.
    """
    if not re.fullmatch(r"[0-9a-f]{32}", str(reference.get("digest"))):
        return None
    data = DataConfig(data_output_path=config.get("data_output_path"))
    buffer = io.BytesIO()
    try:
        content = PictureStore(cache_directory(data) / "pictures").load(reference)
        image = open_picture(content)
    except ValueError:
        return None
    image.thumbnail((96, 96))
    image.save(buffer, "JPEG", quality=70)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
