"""Data files by the ends of their names."""

from collections.abc import Sequence
from pathlib import Path

_TEXT, _PACKED = (".jsonl", ".json", ".csv", ".txt"), ("", ".gz", ".zst")
SUFFIXES = (*(text + packed for text in _TEXT for packed in _PACKED), ".parquet", ".arrow")
# In words, for messages.
DATA_FILES = ".jsonl .json .csv .txt (each also .gz or .zst) .parquet .arrow"
# What `datasets` and the hub write beside the rows.
NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")


def data_suffix(path: Path) -> str | None:
    """The one of ``SUFFIXES`` that ``path`` ends in, lower-cased, or None."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def kind_of_file(path: Path) -> str:
    """The suffix without that of a compression."""
    return (data_suffix(path) or "").removesuffix(".gz").removesuffix(".zst")


def is_note(path: Path) -> bool:
    """Whether ``datasets`` or the hub wrote a file to describe the rows beside it."""
    saved = path.name == "state.json" and path.with_name("dataset_info.json").is_file()
    return saved or path.name in NOTES


def data_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The data files of ``paths``. Beside other data, text files are notes and left out."""
    files = tuple(p for p in paths if data_suffix(p) and not is_note(p) and p.is_file())
    return tuple(p for p in files if kind_of_file(p) != ".txt") or files
