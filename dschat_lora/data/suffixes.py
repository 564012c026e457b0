"""Data files by the ends of their names."""

from collections.abc import Sequence
from pathlib import Path

_TEXT, _PACKED = (".jsonl", ".json", ".csv", ".txt"), ("", ".gz", ".zst")
SUFFIXES = (*(text + packed for text in _TEXT for packed in _PACKED), ".parquet", ".arrow")
# In words, for messages.
DATA_FILES = ".jsonl .json .csv .txt (each also .gz or .zst) .parquet .arrow"
# What `datasets` and the hub write beside the rows.
NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def data_suffix(path: Path) -> str | None:
    """The one of ``SUFFIXES`` that ``path`` ends in, lower-cased, or None."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def kind_of_file(path: Path) -> str:
    """The suffix without that of a compression."""
    return (data_suffix(path) or "").removesuffix(".gz").removesuffix(".zst")


def data_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The data files of ``paths``. Beside other data, text files are notes and left out."""
    files = tuple(p for p in paths if data_suffix(p) and p.name not in NOTES and p.is_file())
    return tuple(p for p in files if kind_of_file(p) != ".txt") or files
