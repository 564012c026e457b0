"""Sources of data sets: local files, directories of them, or a hub name."""

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet", ".txt", ".txt.gz")
# Read where they are named; in a directory with other data they are notes.
NAMED_ONLY = (".txt", ".txt.gz")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.+-]+)?")


@dataclass(frozen=True)
class Source:
    """One entry of ``--data_path``: its files, or the hub data set it names."""

    option: str  # the flag it was given to, without dashes
    entry: str  # as the user wrote it
    files: tuple[Path, ...]  # empty for a hub name

    @property
    def hub_name(self) -> str | None:
        return None if self.files else self.entry


def find_source(option: str, entry: str) -> Source:
    """The files behind ``entry``, or ``entry`` as a hub name (``org/name`` or ``org/name:split``).

    Raises:
        ValueError: naming the option, if the path is missing or holds no data file.
    """
    path = Path(entry).expanduser()
    if path.is_dir():
        return Source(option, entry, _files_of_directory(option, entry, path))
    if path.is_file():
        if data_suffix(path) is None:
            raise ValueError(
                f"--{option} {entry} is a file of another kind; use {' '.join(SUFFIXES)}, "
                "a directory of such files, or a hub name"
            )
        return Source(option, entry, (path,))
    if data_suffix(path) is None and HUB_NAME.fullmatch(entry) and not _is_near_a_path(path):
        return Source(option, entry, ())
    raise ValueError(
        f"--{option} {entry} does not exist{_neighbours(path)}; give a {' '.join(SUFFIXES)} file, "
        "a directory of them, or a hub name such as org/name"
    )


def data_suffix(path: Path) -> str | None:
    """The one of ``SUFFIXES`` that ``path`` ends in, lower-cased, or None."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _files_of_directory(option: str, entry: str, directory: Path) -> tuple[Path, ...]:
    names = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    files = tuple(
        path for path in names if path.is_file() and data_suffix(path) not in (None, *NAMED_ONLY)
    )
    if not files:
        found = ", ".join(path.name for path in names[:5]) or "nothing"
        raise ValueError(
            f"--{option} {entry} is a directory without a data file; it holds {found}; "
            f"files may be {' '.join(s for s in SUFFIXES if s not in NAMED_ONLY)}"
        )
    return files


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
