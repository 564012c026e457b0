"""The output directory of a run: claimed, cleared, and what stood there set aside or left."""

import atexit
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dschat_lora.checkpoint.history import (
    CHECKPOINTS,
    checkpoints_of,
    clear_unfinished,
    quarantine,
    quarantine_checkpoints,
)
from dschat_lora.report.directory import check_idle, default_directory, leftovers
from dschat_lora.report.trackers import TRACKERS_FILE

# Without its run.json nobody would know the directory for that of a run; whoever locks
# metrics.jsonl empties it.
_KEPT = frozenset({"metrics.jsonl", "run.json"})


@dataclass(frozen=True)
class RunDirectory:
    """The output directory of a run. Call methods on one rank."""

    path: Path

    @classmethod
    def claim(
        cls,
        given: str | None,
        *,
        name: str,
        spared: frozenset[str] = frozenset(),
    ) -> "RunDirectory":
        """Create the directory, or empty it of what an earlier run wrote, except ``spared`` names.

        Where the user gave none, it is the first free one of output/NAME, output/NAME-2, ...

        Raises:
            ValueError: if a living run writes to it.
        """
        if given is None:
            return cls(_first_free(name))
        path = cls.reopen(given).path
        for old in leftovers(path):
            if old.name not in _KEPT | spared:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def temporary(cls, name: str) -> "RunDirectory":
        """A directory that goes when this process ends."""
        path = tempfile.mkdtemp(prefix=f"dschat_lora-{name}-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return cls(Path(path))

    @classmethod
    def reopen(cls, given: str) -> "RunDirectory":
        """The directory of a run that goes on, without what a killed process left half written.

        Raises:
            ValueError: if a living run writes to it.
        """
        path = Path(given).expanduser()
        check_links(path)
        check_idle(path)
        clear_unfinished(path)
        return cls(path)

    @classmethod
    def restart(cls, given: str | None, *, name: str) -> "RunDirectory":
        """Claim the directory; unsound checkpoints and their log are kept under other names."""
        unsound = checkpoints_of(cls.reopen(given).path) if given is not None else []
        # What tells how a run went, besides its run.json.
        story = ("metrics.jsonl", "tensorboard") if unsound else ()
        # Those of transformers' Trainer lie in the directory itself.
        of_trainer = [] if given is None else Path(given).expanduser().glob("checkpoint-*")
        spared = frozenset({CHECKPOINTS, *story, *(path.name for path in of_trainer)})
        directory = cls.claim(given, name=name, spared=spared)
        quarantine_checkpoints(directory.path, after=-1, rejected=unsound)
        for path in (directory.path / each for each in story):
            if path.exists():
                quarantine(path, "rejected")
        return directory

    def abandon(self) -> None:
        """Take back what :meth:`claim` made, if the run left no result there."""
        if leftovers(self.path):
            return
        for name in _KEPT:
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def check_links(directory: Path) -> None:
    """Refuse to write through a link out of the directory, which may be somebody else's.

    Raises:
        ValueError: naming the link and where it leads.
    """
    for path in (
        directory / name for name in (*_KEPT, "tensorboard", "wandb", TRACKERS_FILE, CHECKPOINTS)
    ):
        if path.is_symlink() and not path.resolve().is_relative_to(directory.resolve()):
            raise ValueError(
                f"{path} is a link to {path.resolve()}; a run writes to its own directory alone: "
                "remove the link, or make --output_dir itself a link"
            )


def _first_free(name: str) -> Path:
    """The first of output/NAME, output/NAME-2, ... that was free, created."""
    number = 1
    while True:
        path = default_directory(name, number)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path
