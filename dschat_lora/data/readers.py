"""Readers of data files and hub data sets: raw rows with their file and line."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, AnyStr, NamedTuple, cast

from dschat_lora.config.addons import load, provided
from dschat_lora.config.files import TOO_DEEP, json_object
from dschat_lora.data.arrow_rows import arrow_batches, parquet_batches, rows_of, without_absent
from dschat_lora.data.json_stream import JsonError, JsonStream
from dschat_lora.data.row_formats import format_of, row_formats, row_of
from dschat_lora.data.sources import DataSource, kind_of_file

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

# Bytes of a row, or of a text file that is one: to tokenize a text takes a hundred times its size.
MOST_ROW = 32 * 2**20
LINE_COST = 32  # what a line counts for besides its bytes: a million blank ones are no row
# A file that unpacks to more is refused if that is many times its size: text shrinks to a tenth.
MOST_UNPACKED, MOST_RATIO = 2**30, 200
MOST_WORDS = 2000  # characters of what is said of a row
_DECODE = json.JSONDecoder(object_pairs_hook=json_object).decode


class RowError(ValueError):
    """A row that cannot be used: where it is and why."""

    def __init__(self, location: str, reason: str) -> None:
        # Of values of the row a message shows no more than a person reads.
        reason = reason if len(reason) <= MOST_WORDS else f"{reason[:MOST_WORDS]} ..."
        super().__init__(location, reason)

    @property
    def location(self) -> str:
        """The row's place."""
        return str(self.args[0])

    @property
    def reason(self) -> str:
        """What is wrong with it."""
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class RawRow(NamedTuple):
    """One row as read, or the reason why it could not be read."""

    # "file:line"; for .parquet and hub data "name:row", both from 1; in memory "name[index]"
    location: str
    values: dict[str, Any]
    problem: str | None = None

    def read(self) -> "RawRow":
        """The row itself."""
        return self

    @property
    def size(self) -> int:
        """Characters of all its texts."""
        return _text_size(self.values)


class Place(NamedTuple):
    """How far a file, or a shard of a hub data set, has been read."""

    row: int = 0  # rows or, of a file of lines, lines
    byte: int = 0  # of a file of lines: where the next one begins in what is unpacked


START = Place()


class Line(NamedTuple):
    """A line of a file that is not parsed yet, so that another process may do it."""

    location: str
    text: bytes
    parse: Callable[[str], object]  # its value
    end: Place

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.text)

    def read(self) -> RawRow:
        """The row, with a ``problem`` if the line cannot be read."""
        try:
            # Decoded line by line, so that bytes that are not UTF-8 spoil, and name, one line only.
            text = self.text.removeprefix(codecs.BOM_UTF8).decode()
            return _object_row(self.location, self.parse(text))
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 (byte {error.start + 1} of the line)"
        except json.JSONDecodeError as error:
            problem = f"not valid JSON ({error.msg}, column {error.colno})"
        except RecursionError:
            problem = TOO_DEEP
        except ValueError as error:
            problem = str(error)
        return RawRow(self.location, {}, problem)


def json_line(row: RawRow | Line) -> bytes:
    """A row as a line of JSON: of a file of such lines its own, byte for byte.

    What JSON has no form for, such as a date, becomes text.
    """
    if isinstance(row, Line) and row.parse is _parse_json:
        return row.text if row.text.endswith(b"\n") else row.text + b"\n"
    text = json.dumps(row.read().values, ensure_ascii=False, default=str)
    # Half a surrogate pair is escaped, as JSON does it too.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def iter_rows(source: DataSource) -> Iterator[RawRow]:
    """Rows of all files of a source, or of a hub data set, in order.

    Raises:
        ValueError: if a file or hub data set cannot be read at all.
    """
    return (row.read() for row in iter_unread(source))


def iter_unread(source: DataSource) -> Iterator[RawRow | Line]:
    """As :func:`iter_rows`, but lines are not parsed."""
    rows: Iterator[RawRow | Line]
    if source.hub_name is not None:
        hub = load_hub(source) if source.tail is None else source.tail.hub_rows(source)
        rows = hub_rows(source.hub_name, hub)
    elif source.rows is not None:
        of_arrow = hasattr(source.rows, "features")  # as `datasets` has rows
        own = map(without_absent, source.rows) if of_arrow else source.rows
        rows = (_object_row(f"{source.name}[{i}]", _plain(row)) for i, row in enumerate(own))
    else:
        rows = chain.from_iterable(map(iter_unread_file, source.files))
    return islice(rows, source.most)


def hub_rows(
    name: str, rows: "Iterable[Mapping[str, Any]]", start: Place = START
) -> Iterator[RawRow]:
    """Rows of a hub data set, or of a shard of it from ``start`` on."""
    for number, values in enumerate(rows, start=start.row + 1):
        yield RawRow(f"{name}:{number}", without_absent(values))


def _plain(value: object) -> object:
    """A value of a Python program with lists in place of tuples and arrays."""
    if hasattr(value, "tolist"):  # of numpy, as pandas has lists
        value = value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def iter_file(path: Path) -> Iterator[RawRow]:
    """Rows of one file. A line that cannot be read becomes a row with a ``problem``."""
    return (row.read() for row in iter_unread_file(path))


def count_rows(sources: Sequence[DataSource]) -> int | None:
    """Rows of all sources, or None where to count them takes as long as to read them."""
    total = 0
    for source in sources:
        if source.most is not None or source.tail is not None:
            return None
        if source.hub_name is not None:
            total += len(cast("Dataset", load_hub(source)))
        elif source.rows is not None:
            if not isinstance(source.rows, Sized):
                return None
            total += len(source.rows)
        for path in source.files:
            if kind_of_file(path) == ".parquet":
                import pyarrow.parquet

                total += pyarrow.parquet.read_metadata(path).num_rows
            elif kind_of_file(path) == ".jsonl":
                with _open(path) as file:
                    blocks = iter(partial(file.read, 2**20), b"")
                    total += sum(block.count(b"\n") for block in blocks)
            else:
                return None
    return total


def iter_unread_file(path: Path, start: Place = START) -> Iterator[RawRow | Line]:
    """Rows of one file from ``start`` on, lines not parsed.

    What comes before is passed over unread where it can be: lines of a file that is not packed,
    row groups of Parquet, batches of Arrow.

    Raises:
        ValueError: if the file cannot be read.
    """
    readers: dict[str, Callable[[Path], Iterator[RawRow | Line]]] = {
        ".jsonl": partial(_iter_lines, parse=_parse_json, start=start),
        ".json": _iter_json,
        ".txt": _iter_txt,
        ".csv": _iter_csv,
        ".parquet": partial(_iter_batches, read=parquet_batches, first=start.row),
        ".arrow": partial(_iter_batches, read=arrow_batches, first=start.row),
    }
    kind = kind_of_file(path)
    passed_over = 0 if kind in (".jsonl", ".parquet", ".arrow") else start.row
    try:
        unpacked, most = 0, max(MOST_UNPACKED, MOST_RATIO * path.stat().st_size)
        read = readers.get(kind) or partial(_iter_other, read=load(provided("row_file")[kind]))
        for row in islice(read(path), passed_over, None):
            unpacked += row.size
            if unpacked > most:
                raise ValueError(
                    f"{path} holds more than {MOST_RATIO:,} times its size when unpacked, "
                    f"{unpacked:,} bytes so far; if this is intended, unpack it yourself"
                )
            yield row
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _text_size(value: object) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


def load_hub(source: DataSource, **options: bool) -> "Dataset | IterableDataset":
    """The data set of a hub name, of its split ``train`` by default, loaded with ``options``.

    Raises:
        ValueError: in one line, if it cannot be loaded.
    """
    from datasets import load_dataset

    name, config, split = source.hub_parts
    try:
        return load_dataset(name, *([config] if config else []), split=split, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--{source.option} {source.entry} is not a local path and could not be loaded "
            f"from the hub: {reason}"
        ) from error


def _parse_json(line: str) -> object:
    return _DECODE(line)


def _iter_txt(path: Path) -> Iterator[RawRow | Line]:
    """The lines of a format that claims the first, or the file's one document."""
    with _open(path) as file:
        first = next((line for line in _Lines(path, file) if line.strip()), b"")
    if (name := format_of(first.decode("utf-8", "replace"), path)) is not None:
        yield from _iter_lines(path, partial(row_of, name), START)
        return
    with _open(path) as file:
        data = file.read(MOST_ROW + 1)
    if len(data) > MOST_ROW:
        raise _too_large(f"{path}:1", "the file is one document, which")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield RawRow(f"{path}:1", {}, f"not UTF-8 (byte {error.start + 1} of the file)")
        return
    if text.strip():
        yield RawRow(f"{path}:1", {"text": text})


class _Lines(Iterator[AnyStr]):
    """Lines of a file, of which ``size`` characters, those since the last row, are bounded."""

    def __init__(self, path: Path, file: IO[AnyStr]) -> None:
        self.number, self.size = 0, 0
        self.end = 0  # in bytes or characters
        self._path = path
        self._read: Callable[[], AnyStr] = partial(file.readline, MOST_ROW + 1)

    def __next__(self) -> AnyStr:
        line = self._read()
        if not line:
            raise StopIteration
        self.number += 1
        self.end += len(line)
        self.size += len(line) + LINE_COST
        if self.size > MOST_ROW:
            raise _too_large(f"{self._path}:{self.number}", "the row")
        return line


def _too_large(location: str, what: str) -> RowError:
    return RowError(location, f"{what} holds more than {MOST_ROW:,} bytes; divide it into several")


def _open(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked."""
    name = path.name.lower()
    if name.endswith(".zst"):
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    return io.BufferedReader(gzip.GzipFile(path)) if name.endswith(".gz") else path.open("rb")


def _iter_lines(path: Path, parse: Callable[[str], object], start: Place) -> Iterator[Line]:
    with _open(path) as file:
        unread = start.byte
        if file.seekable() and unread:
            unread -= file.seek(unread - 1)  # of gzip it unpacks
        while unread:
            block = file.read(min(unread, 2**20))
            if not block:
                raise EOFError("it has become shorter")
            unread -= len(block)
        lines = _Lines(path, file)
        lines.number, lines.end = start
        for line in lines:
            if line.strip():
                yield Line(f"{path}:{lines.number}", line, parse, Place(lines.number, lines.end))
                lines.size = 0


def _object_row(location: str, value: object) -> RawRow:
    if isinstance(value, Mapping):
        return RawRow(location, dict(value))
    return RawRow(location, {}, f"row is not a JSON object but {type(value).__name__}")


def _iter_json(path: Path) -> Iterator[RawRow]:
    """Rows of a JSON list, or of objects one after another, each with the line it begins on."""
    of_key = {each.list_key: name for name, each in row_formats().items() if each.list_key}
    keys = "|".join(map(re.escape, of_key)) or "(?!)"
    list_begins = re.compile(rf'\s*(?:\{{\s*"({keys})"\s*:\s*)?\[')
    try:
        with _open(path) as file:
            text = JsonStream(io.TextIOWrapper(file, "utf-8-sig"))
            opening = text.skip_match(list_begins)
            in_list, key = opening is not None, opening[1] if opening else None
            name = of_key[key] if key else None
            while (character := text.next()) and not (in_list and character == "]"):
                yield from _json_rows(path, text.line, text.value(), name)
                if in_list and not text.skip(",") and text.next() != "]":
                    raise text.error("Expecting ',' or ']'")
            what = f"{name}'s file to end after its {key}" if name else "one list of objects"
            error = text.error(f"Expecting {what}")
            if in_list and not (
                text.skip("]") and (not name or text.skip("}")) and not text.next()
            ):
                raise error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8") from error
    except JsonError as error:
        reason = f"not valid JSON ({error.message}, column {error.column})"
        raise RowError(f"{path}:{error.line}", reason) from error


def _json_rows(path: Path, line: int, value: object, name: str | None) -> Iterator[RawRow]:
    """The row that ``value`` is, or those of the format of this name or that claims it."""
    location = f"{path}:{line}"
    try:
        name = name or (format_of(value, path) if isinstance(value, dict) else None)
        if name is None:
            yield _object_row(location, value)
        else:
            yield from (RawRow(location, row) for row in row_formats()[name].rows(value))
    except ValueError as error:
        yield RawRow(location, {}, str(error))


def _iter_csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(MOST_ROW)  # by default less than a long document
    with _open(path) as file:
        lines = _Lines(path, io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        reader = csv.reader(lines)
        try:
            header = next(reader, None)
            if header is None:
                return
            if twins := {name for name in header if name and header.count(name) > 1}:
                raise RowError(f"{path}:1", f"the header names {min(twins)!r} twice")
            # A cell may span lines: a row is named after its first one.
            first_line = reader.line_num + 1
            for cells in reader:
                if cells:
                    problem = None
                    if len(cells) != len(header):
                        problem = f"row has {len(cells)} cells, the header names {len(header)}"
                    values = {} if problem else dict(zip(header, cells, strict=True))
                    yield RawRow(f"{path}:{first_line}", values, problem)
                    lines.size = 0
                first_line = reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            raise RowError(f"{path}:{reader.line_num + 1}", f"not valid CSV ({error})") from error


def _iter_other(path: Path, read: Callable[..., Iterator[Any]]) -> Iterator[RawRow]:
    """Rows of a file of a kind that an add-on reads, each its values and what is wrong with it."""
    with _open(path) as file:
        for number, row in enumerate(read(file, most=MOST_ROW), start=1):
            if row is None:
                raise _too_large(f"{path}:{number}", "the row")
            yield RawRow(f"{path}:{number}", *row)


def _iter_batches(
    path: Path, read: Callable[[Path, int], Iterator[Any]], first: int
) -> Iterator[RawRow]:
    """Rows of Arrow's record batches."""
    import pyarrow

    number = first
    try:
        for batch in read(path, first):
            for values in rows_of(batch, most=MOST_ROW):
                number += 1
                if values is None:
                    raise _too_large(f"{path}:{number}", "the row")
                yield RawRow(f"{path}:{number}", values)
    except RowError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
