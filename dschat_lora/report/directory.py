"""Results of a run under its output directory, and the lock of a living run."""

import errno
import fcntl
from pathlib import Path
from typing import Any, TextIO

from dschat_lora.config.addons import written_by_addons
from dschat_lora.config.files import read_json
from dschat_lora.config.staging import open_in_place

# of steps 1 and 2, and of step 3
_FINISHED = ("adapter", "model", "actor", "critic", "actor_ema", "bottleneck_adapter.safetensors")
_RESULTS = ("metrics.jsonl", *_FINISHED, "checkpoints")
_EXTRAS = ("run.json", "rollouts.jsonl.gz", "tensorboard")


def leftovers(path: Path) -> list[Path]:
    """What an earlier run wrote under ``path``; empty if it holds no run.

    A run that failed before its first result is none: its directory can be used again.
    """
    results = [*(path / name for name in _RESULTS), *sorted(path.glob("checkpoint-*"))]
    left = [p for p in results if p.is_dir() or (p.is_file() and p.stat().st_size > 0)]
    names = (*_EXTRAS, *written_by_addons())
    extras = [*(path / name for name in names), *sorted(path.glob("predict_results_*.txt"))]
    return left + [each for each in extras if left and each.exists()]


def is_unfinished(path: Path) -> bool:
    """Whether a run under ``path`` left nothing that its end would have."""
    return not any((path / name).exists() for name in _FINISHED)


def newest_directory(name: str) -> Path | None:
    """The last of output/NAME, output/NAME-2, ... that exists."""
    newest, number = None, 1
    while (path := default_directory(name, number)).is_dir():
        newest, number = path, number + 1
    return newest


def default_directory(name: str, number: int) -> Path:
    """Where run ``number`` of a stage writes if the user names no directory."""
    return Path("output") / (name if number == 1 else f"{name}-{number}")


def open_alone(path: Path) -> TextIO:
    """The file ``metrics.jsonl`` of a run, opened to append and locked while it is open.

    The lock ends with the process, however that ends. Closing any other descriptor of the file
    in this process would end it too.

    Raises:
        ValueError: if another process has it.
        OSError: as :func:`~dschat_lora.config.staging.open_in_place`.
    """
    file: TextIO = open_in_place(path, "a+")
    try:
        # Not inherited by workers, which may outlive a killed run.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return file  # a file system without locks
        file.close()
        raise ValueError(
            f"another run is writing to {path.parent}; wait for it, stop it, or choose another "
            "--output_dir"
        ) from None
    return file


def check_idle(path: Path) -> None:
    """Refuse a directory that a living run writes to.

    Raises:
        ValueError: naming it.
    """
    if (path / "metrics.jsonl").exists():
        open_alone(path / "metrics.jsonl").close()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty if there is none that can be read."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
