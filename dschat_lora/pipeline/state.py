"""State of a pipeline: stages to skip, begin, resume or redo; ``pipeline.json`` records options."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.checkpoint.staging import write_whole
from dschat_lora.config.options import value_text
from dschat_lora.pipeline.recipe import Recipe
from dschat_lora.report.directory import leftovers, read_object

RECORD = "pipeline.json"
_FINISHED = {"status": "finished", "replaces": None}
#: action for a stage: none; a new run; the rest of one; a new run in place of one
How = Literal["skip", "begin", "resume", "redo"]


@dataclass(frozen=True)
class StageStep:
    """A stage and its action."""

    stage: str
    how: How

    @property
    def options(self) -> dict[str, Any]:
        """Options of the stage about its directory."""
        options: dict[str, dict[str, Any]] = {
            "redo": {"overwrite_output_dir": True},
            "resume": {"resume_from_checkpoint": "auto"},
        }
        return options.get(self.how, {})


class PipelineRecord:
    """``pipeline.json``: options and status of each stage, rewritten whole at each update."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RECORD
        self._content = read_object(self._path)

    def stage(self, name: str) -> dict[str, Any] | None:
        """``options`` and ``status`` of a stage; None if it is unknown."""
        found = self._content.get("stages", {}).get(name)
        return found if isinstance(found, dict) else None

    def update(self, name: str, **fields: object) -> None:
        """Add or replace fields of a stage.

        Raises:
            OSError: if the disk refuses; the file stays as it was.
        """
        stages = dict(self._content.get("stages", {}))
        stages[name] = {**(self.stage(name) or {}), **fields}
        self._content = {**self._content, "stages": stages}
        write_whole(self._path, json.dumps(self._content, indent=2) + "\n")

    def finish(self, name: str) -> None:
        """Record that a stage is finished, unless it is known to be."""
        if self.stage(name) != {**(self.stage(name) or {}), **_FINISHED}:
            self.update(name, **_FINISHED)


def run_facts(directory: Path) -> dict[str, Any]:
    """``run.json`` of a stage; empty if there is none that can be read."""
    return read_object(directory / "run.json")


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Make the directory and, inside the block, keep other pipelines out of it.

    Raises:
        ValueError: if one is there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    try:
        # Ends with this process, however it ends: child processes do not inherit it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another pipeline is at work in {directory}; wait for it, stop it, or choose another "
            "--output_dir"
        ) from None
    except OSError:
        return  # a file system without locks


def make_state(
    recipe: Recipe, record: PipelineRecord, *, redo_from: str | None = None
) -> list[StageStep]:
    """The action for each stage, in order; ``redo_from`` and later ones are run again.

    Raises:
        ValueError: if an earlier run differs from what the recipe asks for.
    """
    names = list(recipe.stages)
    if redo_from is not None and redo_from not in names:
        raise ValueError(f"--from {redo_from} must be one of {', '.join(names)}")
    first = len(names) if redo_from is None else names.index(redo_from)
    steps: list[StageStep] = []
    for number, name in enumerate(names):
        action = _redo if number >= first else _how
        how = action(recipe, record, name)
        step = StageStep(name, how)
        _check_inputs(recipe, step, steps)
        steps.append(step)
    return steps


def _how(recipe: Recipe, record: PipelineRecord, name: str) -> How:
    directory, known = recipe.directory / name, record.stage(name)
    facts = run_facts(directory)
    if known is None:
        if found := leftovers(directory):
            raise ValueError(
                f"{directory} holds a run ({', '.join(p.name for p in found)}) that {RECORD} "
                f"beside it does not know; choose another --output_dir, or --from {name} to "
                "replace it"
            )
        return "begin"
    if known.get("replaces") is not None and facts.get("started") == known["replaces"]:
        return "redo"  # it was asked for and has not begun
    finished = facts.get("status") == "finished"
    then, now = known.get("options", {}), recipe.stages[name]
    if changes := _changes(then, now):
        if finished:
            raise ValueError(
                f"{recipe.file}: stage {name} is finished, with other options: "
                f"{'; '.join(changes)}; put them back, or use --from {name} to do it and all "
                "later stages again"
            )
        # Options that are not typed are those of the checkpoint.
        if (dropped := sorted(then.keys() - now.keys())) and checkpoints_of(directory):
            raise ValueError(
                f"{recipe.file}: stage {name} was begun with --{dropped[0]} "
                f"{value_text(then[dropped[0]])}, which is given no more; state what it shall be, "
                f"or use --from {name} to begin again"
            )
    return "skip" if finished else "resume"


def _redo(recipe: Recipe, record: PipelineRecord, name: str) -> How:
    """A new run, in place of an earlier one if there is any."""
    directory = recipe.directory / name
    return "redo" if leftovers(directory) or record.stage(name) is not None else "begin"


def _check_inputs(recipe: Recipe, step: StageStep, before: list[StageStep]) -> None:
    """Refuse to keep a stage whose input model is going to change."""
    pending = {each.stage for each in before if each.how != "skip"}
    stale = [each for each in recipe.sources(step.stage).values() if each in pending]
    begun = leftovers(recipe.directory / step.stage)
    if step.how in ("skip", "resume") and stale and begun:
        raise ValueError(
            f"{recipe.file}: stage {step.stage} stands on the stage {stale[0]}, which is not "
            f"finished; use --from {stale[0]} to do it and all later stages again"
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted(then.keys() | now.keys())
    return [
        f"--{name} was {value_text(then.get(name))}, now {value_text(now.get(name))}"
        for name in names
        if then.get(name) != now.get(name)
    ]
