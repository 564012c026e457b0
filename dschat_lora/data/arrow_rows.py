"""Rows of Parquet and Arrow files, of which a bounded part is in memory.

What a file repeats by reference, such as a long text in a dictionary, can be a million times larger
in memory than on the disk. So values are counted before they become objects of Python, and of a
Parquet file so few rows are decoded at a time that none of its dictionaries makes them too large.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

ROWS_AT_A_TIME = 1000
BYTES_AT_A_TIME = 4 * 2**20  # of rows that become objects of Python at once, about
MOST_DECODED = 2**30  # bytes of the rows of a Parquet file that are decoded at once
ARROW_FILE = b"ARROW1"  # begins an Arrow file; a stream begins otherwise


def parquet_batches(path: Path, first: int = 0) -> Iterator["pyarrow.RecordBatch"]:
    """The record batches of a Parquet file from a row on, of as many as its dictionaries allow.

    Row groups before it are not read. No value is larger than its dictionary, and dictionaries of
    columns of lists, which may have all their values in one row, are kept as such.
    """
    import pyarrow.parquet

    rows, kept, skipped, groups = ROWS_AT_A_TIME, set[str](), 0, list[int]()
    with pyarrow.parquet.ParquetFile(path) as parquet, path.open("rb") as file:
        for number in range(parquet.metadata.num_row_groups):
            group, largest = parquet.metadata.row_group(number), 0
            if not groups and skipped + group.num_rows <= first:
                skipped += group.num_rows
                continue
            groups.append(number)
            for column in map(group.column, range(group.num_columns)):
                dictionary = 0
                if column.dictionary_page_offset:
                    file.seek(column.dictionary_page_offset)
                    dictionary = _page_size(file.read(16))
                elif "DELTA_BYTE_ARRAY" in column.encodings:  # shares beginnings, at most all
                    file.seek(column.data_page_offset)
                    dictionary = max(column.total_uncompressed_size, _page_size(file.read(16)))
                if dictionary * column.num_values <= MOST_DECODED:
                    continue
                if "." in column.path_in_schema:
                    kept.add(column.path_in_schema)
                largest += dictionary
            rows = min(rows, MOST_DECODED // max(largest, 1))
    with pyarrow.parquet.ParquetFile(path, read_dictionary=sorted(kept)) as parquet:
        batches = parquet.iter_batches(batch_size=max(1, rows), row_groups=groups)
        yield from _from_row(batches, first - skipped)


def arrow_batches(path: Path, first: int = 0) -> Iterator["pyarrow.RecordBatch"]:
    """The record batches of an Arrow stream, which ``datasets`` writes, or file, from a row on."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as memory:
        if memory.read(len(ARROW_FILE)) == ARROW_FILE:
            file = pyarrow.ipc.open_file(memory)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            yield from _from_row(batches, first)
        else:
            memory.seek(0)
            yield from _from_row(pyarrow.ipc.open_stream(memory), first)


def _from_row(
    batches: Iterable["pyarrow.RecordBatch"], first: int
) -> Iterator["pyarrow.RecordBatch"]:
    for batch in batches:
        if first < batch.num_rows:
            yield batch.slice(first)
        first = max(0, first - batch.num_rows)


def rows_of(batch: "pyarrow.RecordBatch", *, most: int) -> Iterator[dict[str, Any] | None]:
    """The rows of a record batch; None in place of one that is larger than ``most`` bytes.

    Raises:
        pyarrow.ArrowInvalid: if its offsets lie, or a text is not UTF-8.
    """
    batch.validate(full=True)
    fit = BYTES_AT_A_TIME * batch.num_rows // (_size(batch) + 1)
    count = max(1, min(ROWS_AT_A_TIME, fit))
    for start in range(0, batch.num_rows, count):
        part = batch.slice(start, count)
        if _size(part) <= most:
            yield from map(without_absent, part.to_pylist())
            continue
        for row in (part.slice(i, 1) for i in range(part.num_rows)):
            yield None if _size(row) > most else without_absent(row.to_pylist()[0])


def without_absent(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, of whose messages and tools no object has a null key.

    Arrow gives all objects of a column the same keys: an argument of one tool is null in the calls
    of all others.
    """
    return {
        name: _without_null(value) if name == "tools" or _is_conversation(value) else value
        for name, value in row.items()
    }


def _is_conversation(value: object) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and not first.keys().isdisjoint(("role", "from"))


def _without_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return list(map(_without_null, value)) if isinstance(value, list) else value


def _size(array: "pyarrow.Array | pyarrow.RecordBatch") -> int:
    """Bytes of the values of an array or a record batch, each counted as often as it occurs."""
    import pyarrow.compute as pc
    from pyarrow import types

    if hasattr(array, "columns"):
        return sum(map(_size, array.columns))
    kind = array.type
    own = 8 * len(array)
    if types.is_dictionary(kind):
        values = array.dictionary
        if types.is_string(values.type) or types.is_large_string(values.type):
            lengths = pc.binary_length(values).take(array.indices)
            return own + (pc.sum(lengths).as_py() or 0)
        return own + len(array) * _size(values)
    if types.is_struct(kind):
        return own + sum(map(_size, array.flatten()))
    if types.is_fixed_size_list(kind):
        return own + _size(array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        start, stop = array.offsets[0].as_py(), array.offsets[-1].as_py()
        inner = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        return own + sum(_size(each.slice(start, stop - start)) for each in inner)
    if str(kind) in ("string_view", "binary_view"):
        views = memoryview(array.buffers()[1]).cast("B").cast("i")
        return own + sum(views[4 * array.offset : 4 * (array.offset + len(array)) : 4])
    if "view" in str(kind) or "run_end_encoded" in str(kind):
        raise ValueError(f"columns of the type {kind} are not read")
    return own + int(array.nbytes)


def _page_size(header: bytes) -> int:
    """Bytes of an unpacked page, the second field of its header in Thrift's compact form."""
    at, number = 1, 0
    for _ in range(2):  # the kind of page, and its size
        number = shift = 0
        while at < len(header):
            number |= (header[at] & 0x7F) << shift
            shift += 7
            at += 1
            if header[at - 1] < 0x80:
                break
        at += 1  # the next field's own byte
    return number >> 1
