"""Results of a finished stage, read from run.json and metrics.jsonl for its report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dschat_lora.report.markup import amount
from dschat_lora.report.rollout_file import FILE, read_rollouts


@dataclass(frozen=True)
class StageStory:
    """The content of a stage's run.json and metrics.jsonl, and its responses in step 3."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # all of run.json
    train: Sequence[Mapping[str, Any]] = ()
    evals: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    rollouts: Sequence[Mapping[str, Any]] = ()  # responses of step 3
    notes: Sequence[str] = ()  # on files and lines that cannot be read

    def part(self, name: str) -> Mapping[str, Any]:
        """The object under ``name`` in run.json; empty if there is none."""
        value = self.facts.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Every option of the run."""
        return self.part("config")

    @property
    def phases(self) -> Mapping[str, Mapping[str, Any]]:
        """``seconds`` and ``flops`` of each phase, where the stage has phases."""
        phases = self.part("phases")
        return {name: phase for name, phase in phases.items() if isinstance(phase, Mapping)}

    @property
    def answers(self) -> Sequence[Mapping[str, Any]]:
        """Objects with ``when``, ``prompt`` and ``answer``."""
        value = self.facts.get("answers")
        return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []

    @property
    def seconds(self) -> float:
        """From the start of the run to its last line."""
        lines = [*self.train, *self.evals, *self.events]
        return max((amount(line.get("time")) for line in lines), default=0.0)


def read_story(directory: Path) -> StageStory:
    """The story of the run in ``directory``, as far as it can be read."""
    facts, notes = _read_record(directory / "run.json")
    lines, more = _read_lines(directory / "metrics.jsonl")
    train, evals, events = (
        tuple(line for line in lines if line.get("kind") == kind)
        for kind in ("train", "eval", "event")
    )
    name = str(facts.get("stage") or directory.name)
    rollouts: Sequence[Mapping[str, Any]] = ()
    if (directory / FILE).is_file():
        try:
            rollouts = read_rollouts(directory)
        except (ValueError, OSError) as error:
            more = [*more, str(error)]
    return StageStory(name, facts, train, evals, events, rollouts, (*notes, *more))


def _read_record(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The object in run.json and notes on errors."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}, [f"{path} does not exist"]
    except ValueError:
        content = None
    return (content, []) if isinstance(content, dict) else ({}, [f"{path} is no JSON object"])


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects in metrics.jsonl and notes on errors."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], [f"{path} does not exist"]
    lines, bad = [], 0
    for line in filter(str.strip, text.split("\n")):
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if isinstance(content, dict):
            lines.append(content)
        else:
            bad += 1
    notes = [] if lines else [f"{path} has no lines"]
    return lines, notes + ([f"{path}: lines that cannot be read: {bad}"] if bad else [])
