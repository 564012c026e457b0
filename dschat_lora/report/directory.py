"""Where a run writes: a directory of its own, never one that holds an earlier run by accident."""

import shutil
from pathlib import Path

_RESULTS = ("metrics.jsonl", "adapter", "model", "checkpoints")
_EXTRAS = ("run.json", "tensorboard", "report.html")


def leftovers(path: Path) -> list[Path]:
    """What an earlier run wrote under ``path``; empty if it holds no run.

    A run that failed before its first result is none: its directory can be used again.
    """
    results = [path / name for name in _RESULTS]
    found = [p for p in results if p.is_dir() or (p.is_file() and p.stat().st_size > 0)]
    return found + [path / name for name in _EXTRAS if found and (path / name).exists()]


def claim_directory(given: str | None, *, name: str) -> Path:
    """Create and return the directory of a run, emptied of what an earlier one wrote.

    Args:
        given: the user's choice; None takes the first free of output/NAME, output/NAME-2, ...
        name: of the stage.
    """
    if given is not None:
        path = Path(given).expanduser()
        for old in leftovers(path):
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        path.mkdir(parents=True, exist_ok=True)
        return path
    number = 1
    while True:
        path = Path("output") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def abandon_directory(path: Path) -> None:
    """Take back what :func:`claim_directory` made, if the run left no result there."""
    if leftovers(path):
        return
    for name in ("run.json", "metrics.jsonl"):
        (path / name).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
