"""Data files of a directory: of one split, where the directory or its files name splits."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.config.files import read_json
from dschat_lora.data.suffixes import DATA_FILES, data_files, kind_of_file

# Levels of directories that are searched for data below the one that is named.
MAX_DEPTH = 4
# `train-00000-of-00007-0a1b.parquet`, perhaps with the data set's name in front.
SHARD = re.compile(r"(?:.*-)?(?P<split>\w+)[-.]\d{5}-of-\d{5}")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def files_of_directory(label: str, directory: Path, split: str | None) -> tuple[Path, ...]:
    """The data files directly in a directory or, where there are none, those below it.

    A data set that ``save_to_disk`` wrote has its own list of files. ``split`` takes the files
    that are named after it, themselves or by a directory of theirs. Without it ``train`` is taken
    of files below and of the shards of splits, and all files else. A file named after no split
    belongs to ``train``.

    Raises:
        ValueError: headed by ``label``, the option and its value, if there are none.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = _read_json(directory / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not all(map(_is_name, splits)):
            raise ValueError(f"{directory / 'dataset_dict.json'} has no list of names as 'splits'")
        directory, split = directory / _choose(label, directory, splits, split), None
    if (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file():
        return _saved_files(label, directory, split)
    names = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    files = data_files(names)
    below: tuple[Path, ...] = ()
    if not files or kind_of_file(files[0]) == ".txt":
        below = data_files([path for name in names if name.is_dir() for path in _walk(name)])
    if below and (not files or kind_of_file(below[0]) != ".txt"):
        return _files_of_split(label, directory, below, split)
    if not files:
        found = ", ".join(path.name for path in names[:5]) or "nothing"
        raise ValueError(
            f"{label} is a directory without a data file; it holds {found}; files may be "
            f"{DATA_FILES}"
        )
    if split is None and not any(SHARD.match(path.name) for path in files):
        return files
    return _files_of_split(label, directory, files, split)


def _saved_files(label: str, directory: Path, split: str | None) -> tuple[Path, ...]:
    """The files that ``state.json`` of a saved ``datasets.Dataset`` lists."""
    state = _read_json(directory / "state.json")
    _choose(label, directory, [str(state.get("_split") or "train")], split)
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries
    ):
        raise ValueError(f"{directory / 'state.json'} has no list '_data_files'")
    files = tuple(directory / Path(entry["filename"]).name for entry in entries)
    for file in files:
        if not file.is_file():
            raise ValueError(f"{directory / 'state.json'} names {file.name}, which is not there")
    return files


def _is_name(value: object) -> bool:
    """Whether a split is a name of a directory, and not of one elsewhere."""
    return isinstance(value, str) and value == Path(value).name and value != ".."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _walk(directory: Path) -> Iterator[Path]:
    """Files below a directory that are not hidden, in the order of their names."""
    for folder, folders, names in os.walk(directory):
        # Of the directory itself it is one level below the one that the user named.
        depth = len(Path(folder).relative_to(directory).parts) + 1
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = visible if depth < MAX_DEPTH else []
        yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


def _files_of_split(
    label: str, directory: Path, files: Sequence[Path], split: str | None
) -> tuple[Path, ...]:
    splits = {path: _split_of(path.relative_to(directory)) for path in files}
    chosen = _choose(label, directory, sorted(set(splits.values())), split)
    taken = tuple(path for path in files if splits[path] == chosen)
    folders = sorted({path.parent for path in taken if SHARD.match(path.name)})
    if len(folders) > 1:
        found = ", ".join(str(folder.relative_to(directory)) for folder in folders[:5])
        raise ValueError(f"{label} holds several data sets: {found}; name one of these directories")
    return taken


def _split_of(path: Path) -> str:
    """The split that a file is named after, or a directory of it, or else ``train``."""
    shard = SHARD.match(path.name)
    if shard is not None and shard["split"] not in ("data", "part"):
        return shard["split"]
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return "train"


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
