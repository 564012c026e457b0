"""Sources of data sets: files, directories and patterns of them, a hub name, rows in memory."""

import difflib
import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from dschat_lora.config.addons import provided
from dschat_lora.config.files import read_json
from dschat_lora.config.held import PREFIX, held_object, is_held

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.+-]+){0,2}")
_TEXT, _PACKED = (".jsonl", ".json", ".csv", ".txt"), (".gz", ".zst")
_TABLES = (".parquet", ".arrow")
# What `datasets` and the hub write beside the rows.
NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
# Levels of directories that are searched for data below the one that is named.
MAX_DEPTH = 4
# `train-00000-of-00007-0a1b.parquet`, perhaps with the data set's name in front.
SHARD = re.compile(r"(?:.*-)?(?P<split>\w+)[-.]\d{5}-of-\d{5}")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


@cache
def suffixes() -> tuple[str, ...]:
    """What names of data files end in, those of kinds that add-ons read among them."""
    texts = (*_TEXT, *provided("row_file"))
    return (*(text + packed for text in texts for packed in ("", *_PACKED)), *_TABLES)


def data_files() -> str:
    """The same in words, for messages."""
    texts = " ".join((*_TEXT, *provided("row_file")))
    return f"{texts} (each also {' or '.join(_PACKED)}) {' '.join(_TABLES)}"


class StreamError(ValueError):
    """Data that could not be read on while training."""


class HubReader(Protocol):
    """Reads a source on behind its first rows."""

    def hub_rows(self, source: "DataSource") -> Iterable[Mapping[str, Any]]:
        """Rows of a hub data set that are not downloaded first."""


@dataclass(frozen=True)
class DataSource:
    """One entry of ``--data_path``: its files, or the hub data set it names."""

    option: str  # the flag it was given to, without dashes
    entry: str  # as the user wrote it, without its weight
    files: tuple[Path, ...]  # empty for a hub name, and for rows in memory
    split: str | None = None  # of a hub name, where ``entry`` does not say it
    rows: Iterable[Mapping[str, Any]] | None = None  # of a Python program
    weight: float | None = None  # its share of a mixture, before all of them are made to sum to 1
    most: int | None = None  # rows that are read of it, the first ones
    tail: HubReader | None = None  # where it may be too large

    @property
    def hub_name(self) -> str | None:
        return None if self.files or self.rows is not None else self.entry

    @property
    def name(self) -> str:
        """What locations of rows in memory begin with."""
        return self.entry.removeprefix(PREFIX)

    @property
    def hub_parts(self) -> tuple[str, str | None, str]:
        """Name, configuration and split of ``org/name``, ``org/name:split`` or with both."""
        name, *rest = self.entry.split(":")
        split = rest[-1] if rest else self.split or "train"
        return name, rest[0] if len(rest) == 2 else None, split


def find_source(option: str, entry: str, split: str | None = None) -> DataSource:
    """The files behind ``entry``, or ``entry`` as a hub name.

    A hub name is ``org/name``, ``org/name:split`` or ``org/name:config:split``. ``split`` is that
    of a hub data set or a directory of which ``entry`` does not name one.

    Raises:
        ValueError: naming the option, if the path is missing or holds no data file.
    """
    if not entry:
        raise ValueError(f"--{option} is empty; omit it to use the bundled data")
    path, label = Path(entry).expanduser(), f"--{option} {entry}"
    if is_held(entry):
        _check_no_split(label, "rows in memory", split)
        rows = cast(Iterable[Mapping[str, Any]], held_object(entry, option))
        return DataSource(option, entry, (), rows=rows)
    before, colon, own = entry.rpartition(":")
    if colon and not path.exists() and Path(before).expanduser().is_dir():
        _check_one_split(label, own, split)
        return DataSource(option, entry, files_of_directory(label, Path(before).expanduser(), own))
    if path.is_dir():
        return DataSource(option, entry, files_of_directory(label, path, split))
    if path.is_file():
        return DataSource(option, entry, (_checked_file(label, path, split),))
    if path.exists():  # a pipe would be waited for, and a device has no end
        raise ValueError(f"{label} is not a regular file; give a file ({data_files()})")
    if any(sign in entry for sign in "*?["):
        return DataSource(option, entry, _files_of_pattern(label, path, split))
    # In a local directory a hub name was hardly meant.
    is_local = path.is_absolute() or path.parts[0] in (".", "..", "~") or path.parent.is_dir()
    if data_suffix(path) is None and HUB_NAME.fullmatch(entry) and not is_local:
        _check_one_split(label, own if colon else None, split)
        return DataSource(option, entry, (), split)
    raise ValueError(
        f"{label} does not exist ({_nearby(path)}); give a file ({data_files()}), a directory of "
        "them, a pattern such as 'data/*.jsonl', or a hub name such as org/name"
    )


def _nearby(path: Path) -> str:
    """What is where a missing file was looked for."""
    if not path.parent.is_dir():
        return f"nor does the directory {path.parent}"
    names = sorted(child.name for child in path.parent.iterdir() if data_suffix(child))
    stems = {name.partition(".")[0]: name for name in names}
    close = difflib.get_close_matches(path.name.partition(".")[0], stems, 1, 0.75)
    meant = f"did you mean {path.with_name(stems[close[0]])}? " if close else ""
    return f"{meant}in {path.parent}: {', '.join(names[:5]) or 'no data file'}"


def _checked_file(label: str, path: Path, split: str | None) -> Path:
    if is_note(path):
        raise ValueError(f"{label} describes a data set; give its directory, {path.parent}")
    if data_suffix(path) is None:
        raise ValueError(
            f"{label} is not a supported file type; use {data_files()}, a directory of such "
            "files, or a hub name"
        )
    _check_no_split(label, "a file", split)
    return path


def _files_of_pattern(label: str, pattern: Path, split: str | None) -> tuple[Path, ...]:
    _check_no_split(label, "a pattern", split)
    matches = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = _data_files(matches)
    if not files:
        what = ", ".join(path.name for path in matches[:5]) or "nothing"
        raise ValueError(f"{label} matches no data file ({data_files()}), but {what}")
    return files


def _check_no_split(label: str, kind: str, split: str | None) -> None:
    if split is not None:
        raise ValueError(
            f"--data_split_name {split}: {label} is {kind}; directories and hub data sets have "
            "splits"
        )


def _check_one_split(label: str, own: str | None, split: str | None) -> None:
    if own is not None and split not in (None, own):
        raise ValueError(f"--data_split_name {split} and {label} name different splits")


def data_suffix(path: Path) -> str | None:
    """The one of :func:`suffixes` that ``path`` ends in, lower-cased, or None."""
    name = path.name.lower()
    return next((suffix for suffix in suffixes() if name.endswith(suffix)), None)


def kind_of_file(path: Path) -> str:
    """The suffix without that of a compression."""
    return (data_suffix(path) or "").removesuffix(".gz").removesuffix(".zst")


def is_note(path: Path) -> bool:
    """Whether ``datasets`` or the hub wrote a file to describe the rows beside it."""
    saved = path.name == "state.json" and path.with_name("dataset_info.json").is_file()
    return saved or path.name in NOTES


def _data_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The data files of ``paths``. Beside other data, text files are notes and left out."""
    files = tuple(p for p in paths if data_suffix(p) and not is_note(p) and p.is_file())
    return tuple(p for p in files if kind_of_file(p) != ".txt") or files


def files_of_directory(label: str, directory: Path, split: str | None) -> tuple[Path, ...]:
    """The data files directly in a directory or, where there are none, those below it.

    A data set that ``save_to_disk`` wrote has its own list of files. ``split`` takes the files
    that are named after it, themselves or by a directory of theirs. Without it ``train`` is taken
    of files below and of the shards of splits, and all files else. A file named after no split
    belongs to ``train``.

    Raises:
        ValueError: headed by ``label``, the option and its value, if there are none.
    """
    described = directory / "dataset_dict.json"
    if described.is_file():
        splits = _read_object(described).get("splits")
        # A name of a directory, and not of one elsewhere.
        if not isinstance(splits, list) or not all(
            isinstance(name, str) and name == Path(name).name and name != ".." for name in splits
        ):
            raise ValueError(f"{described} has no list of names as 'splits'")
        directory, split = directory / _choose(label, directory, splits, split), None
    if (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file():
        return _saved_files(label, directory, split)
    names = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    files, below = _data_files(names), tuple[Path, ...]()
    if not files or kind_of_file(files[0]) == ".txt":
        below = _data_files([path for name in names if name.is_dir() for path in _walk(name)])
    if below and (not files or kind_of_file(below[0]) != ".txt"):
        return _files_of_split(label, directory, below, split)
    if not files:
        held = ", ".join(path.name for path in names[:5]) or "nothing"
        raise ValueError(
            f"{label} is a directory without data files; it contains {held}; files may be "
            f"{data_files()}"
        )
    if split is None and not any(SHARD.match(path.name) for path in files):
        return files
    return _files_of_split(label, directory, files, split)


def _saved_files(label: str, directory: Path, split: str | None) -> tuple[Path, ...]:
    """The files that ``state.json`` of a saved ``datasets.Dataset`` lists."""
    described = directory / "state.json"
    state = _read_object(described)
    _choose(label, directory, [str(state.get("_split") or "train")], split)
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries
    ):
        raise ValueError(f"{described} has no list '_data_files'")
    files = tuple(directory / Path(entry["filename"]).name for entry in entries)
    for file in files:
        if not file.is_file():
            raise ValueError(f"{described} names {file.name}, which does not exist")
    return files


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _walk(directory: Path) -> list[Path]:
    """Files below a directory that are not hidden, in the order of their names."""
    files: list[Path] = []
    for folder, folders, names in os.walk(directory):
        # Of the directory itself it is one level below the one that the user named.
        depth = len(Path(folder).relative_to(directory).parts) + 1
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = visible if depth < MAX_DEPTH else []
        files += [Path(folder) / name for name in sorted(names) if not name.startswith(".")]
    return files


def _files_of_split(
    label: str, directory: Path, files: Sequence[Path], split: str | None
) -> tuple[Path, ...]:
    splits = {path: _split_of(path.relative_to(directory)) for path in files}
    chosen = _choose(label, directory, sorted(set(splits.values())), split)
    taken = tuple(path for path in files if splits[path] == chosen)
    folders = sorted({path.parent for path in taken if SHARD.match(path.name)})
    if len(folders) > 1:
        sets = ", ".join(str(folder.relative_to(directory)) for folder in folders[:5])
        raise ValueError(
            f"{label} contains several data sets: {sets}; give one of these directories"
        )
    return taken


def _split_of(path: Path) -> str:
    """The split that a file is named after, or a directory of it, or else ``train``."""
    shard = SHARD.match(path.name)
    if shard is not None and shard["split"] not in ("data", "part"):
        return shard["split"]
    words = (word for part in reversed(path.parts) for word in re.split(r"[^a-z]+", part.lower()))
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _choose(label: str, directory: Path, splits: Sequence[str], split: str | None) -> str:
    """The wanted one of ``splits``, by default ``train`` or the only one."""
    if split is None and len(splits) == 1:
        return splits[0]
    for name in (split, SPLITS.get(split or "")) if split else ("train",):
        if name in splits:
            return str(name)
    if split is None:
        raise ValueError(
            f"{label} has the splits {', '.join(splits)}; name one, as in {directory}:{splits[0]}"
        )
    raise ValueError(f"{label} has no split {split!r}; it has {', '.join(splits)}")
