"""What a run left, or has written so far: run.json, metrics.jsonl, responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dschat_lora.addons.report.markup import HUGE, amount
from dschat_lora.addons.report.rollouts import read_rollouts
from dschat_lora.config.files import parse_json, read_bytes
from dschat_lora.report.rollout_file import FILE

# Bytes of metrics.jsonl; a step takes about one thousand.
MOST_METRICS = 2**28
PHASES = ("generation", "scoring", "training")
OTHER = "evaluation and other"


@dataclass(frozen=True)
class RunData:
    """The content of a run's run.json and metrics.jsonl, and its responses in step 3."""

    name: str  # of the stage
    facts: Mapping[str, Any] = field(default_factory=dict)  # all of run.json
    train: Sequence[Mapping[str, Any]] = ()
    evals: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    rollouts: Sequence[Mapping[str, Any]] = ()  # responses of step 3
    notes: Sequence[str] = ()  # on files and lines that cannot be read
    label: str = ""  # what tells it from other runs of its stage

    def part(self, name: str) -> Mapping[str, Any]:
        """The object under ``name`` in run.json; empty if there is none."""
        return _mapping(self.facts.get(name))

    def objects(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """The objects in the object under ``name`` in run.json, by name."""
        return {key: each for key, each in self.part(name).items() if isinstance(each, Mapping)}

    @property
    def config(self) -> Mapping[str, Any]:
        """Every option of the run."""
        return self.part("config")

    @property
    def audit(self) -> Mapping[str, Any]:
        """Counts of the data; empty if there are none."""
        return _mapping(self.part("data").get("audit"))

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
    def status(self) -> str:
        """What the run says of itself; a killed one says that it is running."""
        return str(self.facts.get("status", "unknown"))

    @property
    def steps(self) -> float:
        """Optimizer steps made."""
        return self.greatest("step")

    def greatest(self, field: str) -> float:
        """The greatest value of a field of the train lines; 0 if there is none."""
        return max((amount(line.get(field)) for line in self.train), default=0.0)

    @property
    def seconds(self) -> float:
        """From the start of the run to its last line."""
        lines = [*self.train, *self.evals, *self.events]
        return max((amount(line.get("time")) for line in lines), default=0.0)

    @property
    def peak_memory(self) -> float:
        """Greatest memory of a process, in bytes; 0 if unknown."""
        whole = amount(self.part("throughput").get("peak_memory_bytes"))
        return max(self.greatest("peak_memory_bytes"), whole)

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """Seconds and floating-point operations of each phase, and of the rest.

        From run.json where it has phases, else summed over the train lines.
        """
        phases = {
            name: (amount(phase.get("seconds")), amount(phase.get("flops")))
            for name, phase in self.objects("phases").items()
        }
        if not phases:
            for name in PHASES:
                seconds = sum(amount(line.get(f"{name}_seconds")) for line in self.train)
                phases |= {name: (seconds, 0.0)} if seconds else {}
        if not phases and self.train:
            world_size = amount(self.facts.get("world_size")) or 1.0
            steps = [
                [amount(line.get(k)) for k in ("step_seconds", "tflops_per_device")]
                for line in self.train
            ]
            flops = sum(seconds * rate for seconds, rate in steps) * 1e12 * world_size
            phases["training"] = (sum(seconds for seconds, _ in steps), flops)
        rest = self.seconds - sum(seconds for seconds, _ in phases.values())
        return phases | ({OTHER: (rest, 0.0)} if rest > 0 else {})


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_token_row(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    columns = [row.get(name) for name in ("tokens", "supervised", "loss")]
    lists = [each for each in columns if isinstance(each, list)]
    if len(lists) < 3 or len(set(map(len, lists))) > 1:
        return False
    tokens, _, losses = lists
    return all(isinstance(each, str) for each in tokens) and all(
        each is None
        or isinstance(each, float)
        or (isinstance(each, int) and abs(each) < HUGE)
        or each in ("nan", "inf", "-inf")
        for each in losses
    )


def read_runs(directories: Sequence[Path]) -> list[RunData]:
    """The data of runs, labelled by as much of their paths as tells them apart."""
    parts = [directory.resolve().parts for directory in directories]
    depth = next(
        (n for n in range(1, 6) if len({each[-n:] for each in parts}) == len(parts)),
        max(map(len, parts), default=1),
    )
    return [
        replace(read_run(directory), label="/".join(each[-depth:]))
        for directory, each in zip(directories, parts, strict=True)
    ]


def read_run(directory: Path, *, metrics: str | None = None) -> RunData:
    """The data of the run in ``directory``, as far as it can be read.

    ``metrics`` is the content of metrics.jsonl, for a process that must not open it.
    """
    notes: list[str] = []
    path = directory / "run.json"
    facts = None
    if (record := _read(path, notes)) is not None:
        facts = _object(record)
        notes += [f"{path} is not a JSON object"] if facts is None else []
    path = directory / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    if metrics is None:
        metrics = _read(path, notes, most=MOST_METRICS)
    if metrics is not None:
        texts = [text for text in metrics.split("\n") if text.strip()]
        lines = [each for each in map(_object, texts) if each is not None]
        notes += [] if lines else [f"{path} has no lines"]
        if bad := len(texts) - len(lines):
            notes.append(f"{path}: lines that cannot be read: {bad}")
    train, evals, events = (
        tuple(line for line in lines if line.get("kind") == kind)
        for kind in ("train", "eval", "event")
    )
    rollouts: Sequence[Mapping[str, Any]] = ()
    if (directory / FILE).is_file():
        try:
            rollouts = read_rollouts(directory)
        except (ValueError, OSError) as error:
            notes.append(str(error))
    facts = facts or {}
    return RunData(
        str(facts.get("stage") or directory.name),
        facts,
        train,
        evals,
        events,
        rollouts,
        tuple(notes),
        label=directory.resolve().name,
    )


def _read(path: Path, notes: list[str], **limit: int) -> str | None:
    """The text of a file; None, and a note, if it cannot be read."""
    try:
        return read_bytes(path, **limit).decode(errors="replace")
    except FileNotFoundError:
        notes.append(f"{path} does not exist")
    except (OSError, ValueError) as error:
        notes.append(f"{path} cannot be read: {error}")
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        content = parse_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def read_metrics(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are of this kind, such as "train" or "eval".

    Raises:
        OSError, ValueError: if there is no such file, or it cannot be read; :func:`read_run`
            takes what it can.
    """
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(parse_json, lines) if row["kind"] == kind]
