"""Where a run writes: a directory of its own, never one that holds an earlier run by accident."""

import shutil
from pathlib import Path

_WRITTEN = ("run.json", "metrics.jsonl", "adapter", "model", "checkpoints")
_EXTRAS = ("tensorboard", "report.html")


def leftovers(path: Path) -> list[Path]:
    """What an earlier run wrote under ``path``; empty if it holds no run."""
    found = [path / name for name in _WRITTEN if (path / name).exists()]
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
