"""Sources of data sets: files, directories and patterns of them, a hub name, rows in memory."""

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dschat_lora.config.held import PREFIX, held_object, is_held
from dschat_lora.data.directories import files_of_directory
from dschat_lora.data.suffixes import DATA_FILES, data_files, data_suffix, is_note

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.+-]+){0,2}")


@dataclass(frozen=True)
class Source:
    """One entry of ``--data_path``: its files, or the hub data set it names."""

    option: str  # the flag it was given to, without dashes
    entry: str  # as the user wrote it
    files: tuple[Path, ...]  # empty for a hub name, and for rows in memory
    split: str | None = None  # of a hub name, where ``entry`` does not say it
    rows: Iterable[Mapping[str, Any]] | None = None  # of a Python program

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


def find_source(option: str, entry: str, split: str | None = None) -> Source:
    """The files behind ``entry``, or ``entry`` as a hub name.

    A hub name is ``org/name``, ``org/name:split`` or ``org/name:config:split``. ``split`` is that
    of a hub data set or a directory of which ``entry`` does not name one.

    Raises:
        ValueError: naming the option, if the path is missing or holds no data file.
    """
    if not entry:
        raise ValueError(f"--{option} is empty; leave it out for the bundled data")
    path, label = Path(entry).expanduser(), f"--{option} {entry}"
    if is_held(entry):
        _check_no_split(label, "rows in memory", split)
        rows = cast(Iterable[Mapping[str, Any]], held_object(entry, option))
        return Source(option, entry, (), rows=rows)
    before, colon, own = entry.rpartition(":")
    if colon and not path.exists() and Path(before).expanduser().is_dir():
        _check_one_split(label, own, split)
        files = files_of_directory(label, Path(before).expanduser(), own)
        return Source(option, entry, files)
    if path.is_dir():
        return Source(option, entry, files_of_directory(label, path, split))
    if path.is_file():
        return Source(option, entry, (_checked_file(label, path, split),))
    if path.exists():  # a pipe would be waited for, and a device has no end
        raise ValueError(f"{label} is no regular file; give a file ({DATA_FILES})")
    if any(sign in entry for sign in "*?["):
        return Source(option, entry, _files_of_pattern(label, path, split))
    if data_suffix(path) is None and HUB_NAME.fullmatch(entry) and not _is_near_a_path(path):
        _check_one_split(label, own if colon else None, split)
        return Source(option, entry, (), split)
    raise ValueError(
        f"{label} does not exist{_neighbours(path)}; give a file ({DATA_FILES}), a directory of "
        "them, a pattern such as 'data/*.jsonl', or a hub name such as org/name"
    )


def _checked_file(label: str, path: Path, split: str | None) -> Path:
    if is_note(path):
        raise ValueError(f"{label} describes a data set; give its directory, {path.parent}")
    if data_suffix(path) is None:
        raise ValueError(
            f"{label} is a file of another kind; use {DATA_FILES}, a directory of such files, or "
            "a hub name"
        )
    _check_no_split(label, "a file", split)
    return path


def _files_of_pattern(label: str, pattern: Path, split: str | None) -> tuple[Path, ...]:
    _check_no_split(label, "a pattern", split)
    found = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True))
    files = data_files(found)
    if not files:
        what = ", ".join(path.name for path in found[:5]) or "nothing"
        raise ValueError(f"{label} matches no data file ({DATA_FILES}), but {what}")
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


def _is_near_a_path(path: Path) -> bool:
    """True if the parent is a local directory, so that a hub name was hardly meant."""
    return path.is_absolute() or path.parts[0] in (".", "..", "~") or path.parent.is_dir()


def _neighbours(path: Path) -> str:
    parent = path.parent
    if not parent.is_dir():
        return f" (nor does the directory {parent})"
    names = sorted(child.name for child in parent.iterdir() if data_suffix(child))
    found = ", ".join(names[:5]) or "no data file"
    return f" (in {parent}: {found})"
