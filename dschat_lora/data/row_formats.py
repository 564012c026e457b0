"""Formats of rows that add-ons know, beside the columns of :mod:`dschat_lora.data.layouts`."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dschat_lora.config.addons import installed, left_out, load, provided


class TwoWayTokenizer(Protocol):
    """A tokenizer that also decodes."""

    eos_token_id: int | None

    def decode(self, token_ids: list[int], **options: bool) -> str: ...

    def encode(self, text: str, **options: bool) -> list[int]: ...


def _never(value: object, path: Path | None) -> bool:
    return False


class RowFormat(NamedTuple):
    """How values of data files become rows.

    An add-on provides it by name: ``provides={"row_format": {"TSV": "my_package.tsv:FORMAT"}}``.
    The object may be one of this class or any other, a module too, with ``rows`` and ``claims``;
    the rest is optional. Messages and audits call the format by its name.

    ``claims`` is asked about the first line of a ``.txt`` file (text), which decides for all of its
    lines; about each object of a ``.json`` file; and about each row, wherever it comes from, whose
    columns, named as by ``--columns``, are not simply those of a row type. What no format claims is
    read as usual.

    Attributes:
        rows: the rows of a value, exactly one of a line or of a row. They have the columns of a row
            type, such as prompt and completion, or of a published layout. A ValueError is said
            behind the file and line.
        claims: whether a value is of this format, by the value and the ``.txt`` or ``.json`` file;
            of a row the file is None.
        list_key: a JSON file ``{"KEY": [...]}`` of this key is a list of values of this format,
            which ``claims`` is not asked about.
        texts: prompt and completion of a row as texts, where rows hold something else, such as
            token ids: the row again, by the row and the tokenizer of the model.
    """

    rows: Callable[[Any], list[dict[str, Any]]]
    claims: Callable[[Any, Path | None], bool] = _never
    list_key: str = ""
    texts: Callable[[Mapping[str, Any], TwoWayTokenizer], dict[str, Any]] | None = None


@cache
def row_formats() -> Mapping[str, RowFormat]:
    """The formats of all add-ons by name; one that cannot be used is left out with a warning."""
    formats: dict[str, RowFormat] = {}
    for addon in installed().values():
        with left_out(addon.name):
            for name, path in addon.provides.get("row_format", {}).items():
                own = load(path)
                # Of an object of another class, what it has.
                more = {n: getattr(own, n) for n in ("list_key", "texts") if hasattr(own, n)}
                formats[name] = RowFormat(own.rows, own.claims, **more)
    return formats


def format_of(value: object, path: Path | None = None) -> str | None:
    """The name of the first format that claims a value."""
    return next((name for name, each in row_formats().items() if each.claims(value, path)), None)


def row_of(name: str, value: object) -> dict[str, Any]:
    """The row that a format makes of a value.

    Raises:
        ValueError: if it makes none or several.
    """
    rows = row_formats()[name].rows(value)
    if len(rows) != 1:
        raise ValueError(f"{name} makes {len(rows)} rows of this instead of one")
    return rows[0]


def format_files() -> dict[str, Path]:
    """The file of each format's module, by name, and of each reader of a kind of files."""
    paths, files = provided("row_format"), provided("row_file")
    modules = {**{name: paths[name] for name in row_formats()}, **files}
    return {
        name: Path(str(import_module(path.partition(":")[0]).__file__))
        for name, path in modules.items()
    }
