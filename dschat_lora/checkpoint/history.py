"""The checkpoints of a run and what becomes of them.

Those of the stages are ``RUN/checkpoints/step-00000100``, those of transformers' Trainer
``RUN/checkpoint-100``.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.manifest import DamagedError, verify
from dschat_lora.config.files import read_json
from dschat_lora.config.staging import remove

CHECKPOINTS = "checkpoints"
#: beside the tensors of a checkpoint: everything that is none
STATE_FILE = "state.json"
_UNFINISHED = re.compile(r"\.((?:step-[0-9]{8,})|(?:checkpoint-[0-9]+))\.(tmp|old|deleted)")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, None without a valid one, and newer ones rejected."""

    path: Path | None
    rejected: Mapping[Path, str]  # the damage found in each, highest step first


def is_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` is a directory that holds the state of a run."""
    return (Path(path) / STATE_FILE).is_file()


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors: ``step``, ``identity``, ``config`` and more.

    Raises:
        ValueError: if it is not what a run writes.
    """
    path = checkpoint / STATE_FILE
    try:
        state = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not the state of a run: {error}") from None
    fields = state if isinstance(state, dict) else {}
    parts = (fields.get("identity"), fields.get("config"), fields.get("engines", {}))
    are_objects = all(isinstance(part, dict) for part in parts)
    if type(fields.get("step")) is not int or not are_objects:
        raise ValueError(f"{path} is not the state of a run")
    return fields


def step_directory(run: Path, step: int) -> Path:
    """Where a run keeps the checkpoint taken after ``step`` optimizer steps."""
    return run / CHECKPOINTS / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint, None for any other name."""
    match = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})|checkpoint-([1-9][0-9]*)", path.name)
    return int(match[1] or match[2]) if match else None


def checkpoints_of(run: Path) -> list[Path]:
    """The checkpoint directories of a run, highest step first; damaged ones included."""
    return [path for _, path in _numbered(run)]


def newest_valid(run: Path) -> Choice:
    """The newest checkpoint of ``run`` that is as its manifest says.

    Reads every file of the candidates until one is valid.
    """
    rejected: dict[Path, str] = {}
    for path in checkpoints_of(run):
        try:
            verify(path, kind="checkpoint")
        except DamagedError as error:
            rejected[path] = str(error)
        else:
            return Choice(path, rejected)
    return Choice(None, rejected)


def rotate(run: Path, *, keep: int, newest: int, best: int | None = None) -> None:
    """Delete all but ``keep`` checkpoints, or none if 0; call on one rank.

    ``newest``, the step just written, has its final name and counts. So does the one after step
    ``best``, which stays: with it at least two are kept. Later ones are of another
    history and stay; links are left alone. A directory loses its valid name before its first
    file, so a killed process leaves no part of a checkpoint under such a name.
    """
    assert keep >= 0
    own = [path for step, path in _numbered(run) if step <= newest]
    kept = [path for path in own if step_of(path) in (newest, best)]
    others = [path for path in own if path not in kept]
    for path in others[max(0, keep - len(kept)) :] if keep else []:
        if not path.is_symlink():
            doomed = path.with_name(f".{path.name}.deleted")
            remove(doomed)
            path.rename(doomed)
            remove(doomed)


def quarantine_checkpoints(run: Path, *, after: int, rejected: Iterable[Path] = ()) -> list[Path]:
    """Rename the checkpoints that a run resumed at step ``after`` leaves behind.

    Later ones belong to another history, which no resume may pick up again; they become
    ``NAME.abandoned``. ``rejected`` ones of any step, found damaged, become ``NAME.rejected``. A
    number is added where that name is taken. Returns the new paths, highest step first. Call on
    one rank.
    """
    damaged = {step_of(path) for path in rejected}
    renamed = []
    for step, path in _numbered(run):
        if step in damaged:
            renamed.append(quarantine(path, "rejected"))
        elif step > after:
            renamed.append(quarantine(path, "abandoned"))
    return renamed


def clear_unfinished(run: Path) -> None:
    """Remove what a killed process left of directories it was writing or deleting.

    A directory caught between the two renames of a replacement takes its name back. Call on one
    rank, while nothing writes to ``run``.
    """
    for path in sorted(_inside(run)):
        match = _UNFINISHED.fullmatch(path.name)
        if match is not None:
            _clear(path, path.with_name(match[1]) if match[2] == "old" else None)
    for name in ("adapter", "model"):
        _clear(run / f".{name}.tmp", None)
        _clear(run / f".{name}.old", run / name)


def _numbered(run: Path) -> list[tuple[int, Path]]:
    """Step and path of each checkpoint, highest step first."""
    numbered = [(step_of(path), path) for path in _inside(run) if path.is_dir()]
    return sorted(((step, path) for step, path in numbered if step is not None), reverse=True)


def _inside(run: Path) -> list[Path]:
    """What lies where a run keeps checkpoints."""
    places = [place for place in (run / CHECKPOINTS, run) if place.is_dir()]
    return [path for place in places for path in place.iterdir()]


def quarantine(path: Path, ending: str) -> Path:
    """Rename to ``NAME.ending``, or ``NAME.ending.2``, ... where that is taken; the new path."""
    target, number = path.with_name(f"{path.name}.{ending}"), 1
    while os.path.lexists(target):
        number += 1
        target = path.with_name(f"{path.name}.{ending}.{number}")
    return path.rename(target)


def _clear(path: Path, home: Path | None) -> None:
    """Give ``path`` the free name ``home``, or remove it."""
    if home is not None and os.path.lexists(path) and not os.path.lexists(home):
        path.rename(home)
    else:
        remove(path)
