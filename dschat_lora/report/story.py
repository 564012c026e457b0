"""What a run left, or has written so far: run.json, metrics.jsonl, responses, checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dschat_lora.config.files import parse_json, read_bytes
from dschat_lora.report.markup import HUGE, amount
from dschat_lora.report.rollout_file import FILE, read_rollouts

# Bytes of metrics.jsonl; a step takes about one thousand.
MOST_METRICS = 2**28


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
    label: str = ""  # what tells it from other runs of its stage
    checkpoints: Sequence[tuple[str, int]] = ()  # directories on the disk, and their bytes

    def part(self, name: str) -> Mapping[str, Any]:
        """The object under ``name`` in run.json; empty if there is none."""
        value = self.facts.get(name)
        return value if isinstance(value, Mapping) else {}

    @property
    def config(self) -> Mapping[str, Any]:
        """Every option of the run."""
        return self.part("config")

    def objects(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """The objects in the object under ``name`` in run.json, by name."""
        return {key: each for key, each in self.part(name).items() if isinstance(each, Mapping)}

    @property
    def phases(self) -> Mapping[str, Mapping[str, Any]]:
        """``seconds`` and ``flops`` of each phase, where the stage has phases."""
        return self.objects("phases")

    @property
    def answers(self) -> Sequence[Mapping[str, Any]]:
        """Objects with ``when``, ``prompt`` and ``answer``."""
        value = self.facts.get("answers")
        return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []

    @property
    def token_losses(self) -> Sequence[Mapping[str, Any]]:
        """Objects with ``when``, ``name`` and lists of ``tokens``, ``supervised`` and ``loss``."""
        value = self.facts.get("token_losses")
        rows = [r for r in value if _is_token_row(r)] if isinstance(value, list) else []
        return [{**row, "loss": [x and float(x) for x in row["loss"]]} for row in rows]

    @property
    def is_running(self) -> bool:
        """Whether the run says that it has not ended; a killed one says so too."""
        return self.facts.get("status") == "running"

    @property
    def steps(self) -> float:
        """Optimizer steps made."""
        return max((amount(line.get("step")) for line in self.train), default=0.0)

    @property
    def seconds(self) -> float:
        """From the start of the run to its last line."""
        lines = [*self.train, *self.evals, *self.events]
        return max((amount(line.get("time")) for line in lines), default=0.0)


def _is_token_row(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    tokens, supervised, losses = (row.get(name) for name in ("tokens", "supervised", "loss"))
    if not (isinstance(tokens, list) and isinstance(supervised, list) and isinstance(losses, list)):
        return False
    return (
        len(tokens) == len(supervised) == len(losses)
        and all(isinstance(each, str) for each in tokens)
        and all(
            each is None
            or isinstance(each, float)
            or (isinstance(each, int) and abs(each) < HUGE)
            or each in ("nan", "inf", "-inf")
            for each in losses
        )
    )


def read_stories(directories: Sequence[Path]) -> list[StageStory]:
    """The stories of runs, labelled by as much of their paths as tells them apart."""
    parts = [directory.resolve().parts for directory in directories]
    depth = next(
        (n for n in range(1, 6) if len({each[-n:] for each in parts}) == len(parts)),
        max(map(len, parts), default=1),
    )
    return [
        replace(read_story(directory), label="/".join(each[-depth:]))
        for directory, each in zip(directories, parts, strict=True)
    ]


def read_story(directory: Path, *, metrics: str | None = None) -> StageStory:
    """The story of the run in ``directory``, as far as it can be read.

    ``metrics`` is the content of metrics.jsonl, for a process that must not open it.
    """
    facts, notes = _read_record(directory / "run.json")
    path = directory / "metrics.jsonl"
    lines, more = _read_lines(path) if metrics is None else _parse_lines(metrics, path)
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
    return StageStory(
        name,
        facts,
        train,
        evals,
        events,
        rollouts,
        (*notes, *more),
        label=directory.resolve().name,
        checkpoints=_checkpoints(directory / "checkpoints"),
    )


def read_metrics(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are of this kind, such as "train" or "eval".

    Raises:
        OSError, ValueError: if there is no such file, or it cannot be read; :func:`read_story`
            takes what it can.
    """
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(parse_json, lines) if row["kind"] == kind]


def _checkpoints(directory: Path) -> list[tuple[str, int]]:
    """Name and bytes of each directory of a checkpoint."""
    found = []
    for path in sorted(directory.glob("step-*")) if directory.is_dir() else []:
        try:
            found.append((path.name, sum(f.stat().st_size for f in path.rglob("*") if f.is_file())))
        except OSError:
            continue  # a run that goes on has just deleted it
    return found


def _read_record(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The object in run.json and notes on errors."""
    try:
        text = read_bytes(path).decode(errors="replace")
    except FileNotFoundError:
        return {}, [f"{path} does not exist"]
    except (OSError, ValueError) as error:
        return {}, [f"{path} cannot be read: {error}"]
    try:
        content = parse_json(text)
    except ValueError:
        content = None
    return (content, []) if isinstance(content, dict) else ({}, [f"{path} is no JSON object"])


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects in metrics.jsonl and notes on errors."""
    try:
        text = read_bytes(path, most=MOST_METRICS).decode(errors="replace")
    except FileNotFoundError:
        return [], [f"{path} does not exist"]
    except (OSError, ValueError) as error:
        return [], [f"{path} cannot be read: {error}"]
    return _parse_lines(text, path)


def _parse_lines(text: str, path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    lines, bad = [], 0
    for line in filter(str.strip, text.split("\n")):
        try:
            content = parse_json(line)
        except ValueError:
            content = None
        if isinstance(content, dict):
            lines.append(content)
        else:
            bad += 1
    notes = [] if lines else [f"{path} has no lines"]
    return lines, notes + ([f"{path}: lines that cannot be read: {bad}"] if bad else [])
