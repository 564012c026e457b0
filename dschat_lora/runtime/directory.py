"""The output directory of a run: claimed, cleared, and what stood there set aside or left."""

import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from dschat_lora.checkpoint.history import (
    CHECKPOINTS,
    checkpoints_of,
    clear_unfinished,
    quarantine,
    quarantine_checkpoints,
)
from dschat_lora.config.addons import written_by_addons
from dschat_lora.config.staging import check_within
from dschat_lora.models.source import ModelSource
from dschat_lora.report.directory import check_idle, default_directory, is_unfinished, leftovers
from dschat_lora.runtime.resume import OutputOptions, is_first_rank, resumes_in_place

if TYPE_CHECKING:
    from dschat_lora.runtime.resume import Resumable

# Without its run.json nobody would know the directory for that of a run; whoever locks
# metrics.jsonl empties it.
_KEPT = frozenset({"metrics.jsonl", "run.json"})
# What is written in its place; what is replaced as a whole, such as adapter/, may be a link.
_WRITTEN_IN = (
    *(*sorted(_KEPT), CHECKPOINTS, "tensorboard", "rollouts.jsonl.gz"),
    *("actor", "critic", "actor_ema"),
)


@dataclass(frozen=True)
class RunDirectory:
    """The output directory of a run. Call methods on one rank."""

    path: Path

    @classmethod
    def claim(
        cls, given: str | None, *, name: str, spared: frozenset[str] = frozenset()
    ) -> "RunDirectory":
        """Create the directory, or empty it of what an earlier run wrote, except ``spared`` names.

        Where the user gave none, it is the first free one of output/NAME, output/NAME-2, ...

        Raises:
            ValueError: if it cannot be created, or a living run writes to it.
        """
        if given is None:
            for number in count(1):
                path = default_directory(name, number)
                with suppress(FileExistsError):
                    path.mkdir(parents=True)
                    return cls(path)
        assert given is not None
        path = cls.reopen(given).path
        for old in leftovers(path):
            if old.name not in _KEPT | spared:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output_dir {path} cannot be created: {error.strerror}") from error
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
    """Refuse to write through a link out of the directory, or to a pipe: it may be a stranger's.

    Raises:
        ValueError: naming the link and where it leads.
    """
    names = (*_WRITTEN_IN, *written_by_addons())
    for path in (*(directory / name for name in names), *directory.glob("checkpoint-*")):
        check_within(path, directory)


def check_output_dir(config: "Resumable", _: object) -> None:
    """Refuse a directory that holds another run; only on the first rank, which creates it."""
    run = config.run
    if run.output_dir is None or not is_first_rank():
        return
    path = Path(run.output_dir).expanduser()
    check_can_be_made(path)
    if not run.overwrite_output_dir:  # that makes room first
        check_room(path, 2**20)  # log, record and report of the smallest run
    check_links(path)
    check_idle(path)
    earlier = leftovers(path)
    if not earlier or resumes_in_place(config):
        return
    names = ", ".join(old.name for old in earlier)
    goes_on = run.resume_from_checkpoint == "auto" and is_unfinished(path)
    if not run.overwrite_output_dir and not goes_on:
        ways = ["choose another directory", "delete that run with --overwrite_output_dir"]
        if checkpoints_of(path):
            ways.insert(1, "resume it with --resume_from_checkpoint latest")
        raise ValueError(
            f"--output_dir {path} holds an earlier run ({names}); {', '.join(ways[:-1])} or "
            f"{ways[-1]}"
        )
    if not (path / "run.json").is_file():
        raise ValueError(
            f"--output_dir {path} holds {names} but no run.json, so no run wrote it; "
            "--overwrite_output_dir only deletes runs; choose another directory"
        )


def check_can_be_made(path: Path, option: str = "output_dir") -> None:
    """Refuse a directory that this user cannot create."""
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"--{option} {path} cannot be created: {nearest} is not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"--{option} {path} cannot be created: {nearest} is not writable")


def check_file_can_be_made(name: str, option: str) -> None:
    """Refuse a file that this user cannot create, before there is anything to write to it."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"--{option} {name} is a directory; give a file")
    check_can_be_made(path.parent, option)


def check_room(path: Path, need: int) -> None:
    """Refuse a directory on a disk with fewer than ``need`` bytes free for this user."""
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    try:
        disk = shutil.disk_usage(nearest)
    except OSError:
        return
    if disk.total and disk.free < need:  # some network file systems tell no sizes
        raise ValueError(
            f"--output_dir {path}: its disk has {disk.free / 2**20:,.1f} MiB free, but the run "
            f"writes at least {need / 2**20:,.1f} MiB; free space, or choose a directory on "
            "another disk"
        )


def check_source_is_kept(run: OutputOptions, source: ModelSource) -> None:
    """Refuse to overwrite the directory that the model comes from."""
    if run.output_dir is None:
        return
    read = [source.adapter, Path(source.base)]
    for old in leftovers(Path(run.output_dir).expanduser()):
        if any(p is not None and p.resolve().is_relative_to(old.resolve()) for p in read):
            raise ValueError(
                f"--overwrite_output_dir would delete {old}, which the run starts from; "
                "choose another --output_dir"
            )
