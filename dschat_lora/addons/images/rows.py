"""Rows with pictures, as TRL, transformers, OpenAI, LLaMA-Factory and others write them, as one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.addons.images.pictures import Picture, picture_of
from dschat_lora.data.messages import IMAGES, is_there, medium_of
from dschat_lora.data.rows import split_preference

IMAGE = "<image>"  # stands for a picture in a text
_PLACE = {"type": "image"}  # and in messages
_KINDS = ("image", "image_url", "input_image")  # of parts
_TEXTS = (None, "text", "input_text", "output_text")
# Keys of a part that hold its picture.
_OWN = ("image", "image_url", "url", "base64", "bytes", "value", "source", "path")
Read = Callable[[str, Any], Picture]


def with_pictures(
    values: dict[str, Any],
    fields: Sequence[str],
    folder: str | Path | None,
    *,
    allow_urls: bool = False,
) -> dict[str, Any]:
    """The row with ``images``, a tuple of its pictures in the order of its text.

    A picture's place is the part ``{"type": "image"}`` of messages, in a message that has one
    beside parts ``{"type": "text", "text": ...}`` alone, and ``<image>`` of a text. A preference
    has its ``prompt``. Messages without any place have one for each picture of the column in front
    of the first user message that is text, as TRL has it. A row without pictures stays as it is,
    but for its empty columns.

    Args:
        values: columns of a row type.
        fields: those that are read.
        folder: what paths are relative to; None refuses them.
        allow_urls: whether pictures may be URLs.

    Raises:
        ValueError: if a picture cannot be one, there are more or fewer of them than places, or
            an answer to a prompt has one.
    """

    def read(where: str, value: object) -> Picture:
        try:
            return picture_of(value, folder, allow_urls=allow_urls)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    column, items = _column(values)
    rest = {name: value for name, value in values.items() if name not in IMAGES}
    if not items and not any(_is_image(part) for name in fields for part in _parts(values[name])):
        return rest
    if {type(values[name]) for name in fields} not in ({str}, {list}):
        return rest  # refused where fields are checked
    if "chosen" in fields:
        prompt, chosen, rejected = split_preference(rest)
        rest |= {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for name in {"completion", "chosen", "rejected"}.intersection(fields):
        if any(_is_image(part) or _has_sign(part) for part in _parts(rest[name])):
            raise ValueError(f"`{name}` has a picture; an answer is text alone")
    pictures = [read(f"`{column}` item {n}", item) for n, item in enumerate(items, 1)]
    host = "prompt" if "chosen" in fields else fields[0]
    text, own = _placed(host, rest[host], len(pictures), read)
    if (places := own.count(None)) != len(pictures):
        counts = f"`{column}` has {len(pictures)}, `{host}` places for {places}"
        place = IMAGE if isinstance(text, str) else '{"type": "image"}'
        raise ValueError(f"pictures: {counts}; a place is {place}")
    ordered = iter(pictures)
    return rest | {host: text, "images": tuple(each or next(ordered) for each in own)}


def _column(values: dict[str, Any]) -> tuple[str, list[Any]]:
    """The column of pictures, and what it has."""
    columns = {name: _plain(values[name]) for name in IMAGES if name in values}
    held = [name for name in columns if is_there(columns[name])]
    if len(held) > 1:
        raise ValueError("row has pictures in `images` and in `image`; give one of them")
    items = columns[held[0]] if held else []
    return (held or IMAGES)[0], items if isinstance(items, list) else [items]


def _placed(name: str, messages: Any, count: int, read: Read) -> tuple[Any, list[Picture | None]]:
    """Text or messages in the one form; of each place its own picture or None for the column's."""
    if isinstance(messages, str):
        return messages, [None] * messages.count(IMAGE)
    parts = list(_parts(messages))
    by_sign = not any(map(_is_image, parts))
    if not by_sign and any(map(_has_sign, parts)):
        raise ValueError(f"`{name}` has parts of type 'image' and a text with {IMAGE}")
    if by_sign and not any(map(_has_sign, parts)):
        return _in_front(messages, count)
    made, own = list[Any](), list[Picture | None]()
    for number, message in enumerate(messages, 1):
        content, before = list[Any](), len(own)
        for part in _parts([message]):
            if _is_image(part):
                own.append(_own_picture(f"`{name}` item {number}", part, read))
                content.append(dict(_PLACE))
            elif not _is_text(part):
                content.append(part)
            else:
                text, *others = part["text"].split(IMAGE) if by_sign else [part["text"]]
                content += [{"type": "text", "text": text}] if text or not others else []
                for text in others:
                    own.append(None)
                    content += [dict(_PLACE), *([{"type": "text", "text": text}] if text else [])]
        made.append({**message, "content": content} if len(own) > before else message)
    return made, own


def _in_front(messages: list[Any], count: int) -> tuple[list[Any], list[Picture | None]]:
    """Messages with places in front of the first user message that is text, if there is one."""
    for number, message in enumerate(messages):
        is_user = isinstance(message, dict) and message.get("role") == "user"
        if is_user and isinstance(message.get("content"), str):
            content = [dict(_PLACE) for _ in range(count)] + list(_parts([message]))
            made = [*messages[:number], {**message, "content": content}, *messages[number + 1 :]]
            return made, [None] * count
    return messages, []


def _own_picture(where: str, part: dict[str, Any], read: Read) -> Picture | None:
    part = {key: _plain(part[key]) for key in (*_OWN, "text") if key in part}
    held = [key for key in part if is_there(part[key])]
    if held == ["bytes", "path"]:
        held = ["bytes"]
    if len(held) > 1:
        raise ValueError(f"{where}: an image part has {' and '.join(map(repr, held))}; give one")
    for key in held:
        is_encoded = key in ("bytes", "base64", "text")
        return read(where, {key: part[key]} if is_encoded else part[key])
    return None


def _parts(value: object) -> Iterator[Any]:
    """The parts of a text or of messages, a text as one."""
    if isinstance(value, str):
        yield {"type": "text", "text": value}
    for message in value if isinstance(value, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list) else _parts(content)


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _KINDS


def _is_text(part: object) -> bool:
    """Whether a part is text, and holds nothing else."""
    if not isinstance(part, dict) or part.get("type") not in _TEXTS:
        return False
    return isinstance(part.get("text"), str) and medium_of(part) is None


def _has_sign(part: Any) -> bool:
    return _is_text(part) and IMAGE in part["text"]


def _plain(value: object) -> object:
    """A value with lists in place of what numpy, Arrow and programs have for them."""
    for name in ("as_py", "tolist"):
        value = getattr(value, name)() if hasattr(value, name) else value
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
