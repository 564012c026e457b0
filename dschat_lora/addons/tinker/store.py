"""What the service keeps on disk: states of runs, requests not yet part of them, and weights."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from dschat_lora.addons.tinker.adapters import CHECKPOINT_FILE
from dschat_lora.checkpoint.tensors import save_weights
from dschat_lora.config.staging import check_place, open_in_place, staged_file, write_whole

Facts = dict[str, Any]  # JSON-able, by name
SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
UNNAMED = ".unnamed-"  # weights for a sampler that no request can name
KEPT_UNNAMED = 4  # of each run
KEPT_RESULTS = 512  # of each run, which clients may still ask for
MOST_NUMBER = 2**31 - 1  # of a request, a model or seconds
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_STATE = "state.safetensors"
_CHANGING = threading.Lock()  # facts of saved weights, which requests of a server change


def now() -> str:
    """The time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def end_of_time(seconds: int | None) -> str | None:
    """When weights go that stay so long; None: never.

    Raises:
        ValueError: if it is no such time.
    """
    if seconds is None:
        return None
    if not 1 <= seconds <= MOST_NUMBER:
        raise ValueError(f"ttl_seconds must be from 1 to {MOST_NUMBER}")
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def kept_facts(place: Path) -> Facts | None:
    """What is known of saved weights; None where there are none, or their time is over."""
    if not (place / CHECKPOINT_FILE).is_file():
        return None
    facts = _read(place / CHECKPOINT_FILE)
    return None if _is_over(facts) else facts


def _is_over(facts: Facts) -> bool:
    return (ends := facts.get("expires_at")) is not None and ends <= now()


def _read(path: Path) -> Facts:
    facts: Facts = json.loads(path.read_text("utf-8"))
    return facts


@dataclass(frozen=True)
class Weights:
    """Saved weights: of a run, for training or a sampler, under a name."""

    run: str
    kind: str  # of KINDS
    name: str

    @property
    def path(self) -> str:
        """``tinker://RUN/KIND/NAME``."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def parse_path(path: str) -> Weights:
    """What ``tinker://RUN/KIND/NAME`` names.

    Raises:
        ValueError: if it names nothing.
    """
    run, kind, name, *more = [*path.removeprefix(SCHEME).split("/"), "", "", ""]
    if not path.startswith(SCHEME) or kind not in KINDS or any(more):
        raise ValueError(
            f"path must be like tinker://RUN/weights/NAME or .../sampler_weights/NAME, got "
            f"{path!r:.120}"
        )
    return Weights(run, kind, name)


class RunStore:
    """The directory of a run.

    ``state.safetensors`` holds the adapter and AdamW after a request, ``log/`` the requests that
    were accepted after it, in order, ``results/`` what they have given so far. So a service that
    was killed finds all that it has acknowledged.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self.directory, self.run = directory, run
        self._log, self._results = directory / "log", directory / "results"

    def create(self, facts: Facts) -> None:
        """Make the directory of a new run."""
        for each in (self._log, self._results):
            each.mkdir(parents=True, exist_ok=True)
        write_whole(self.directory / "run.json", json.dumps(facts, indent=1) + "\n")

    def facts(self) -> Facts:
        """What is known of the run beside its state."""
        return _read(self.directory / "run.json")

    def write_state(self, tensors: Mapping[str, Tensor], facts: Facts) -> None:
        """The state after request ``facts["seq"]``; what was logged up to it is dropped."""
        with staged_file(self.directory / _STATE) as staging:
            flat = {key: value.cpu().contiguous() for key, value in tensors.items()}
            save_weights(staging, flat, {"facts": json.dumps(facts)})
        for seq, path in self._numbered(self._log):
            if seq <= facts["seq"]:
                path.unlink()
        for seq, path in self._numbered(self._results):
            # They may still be asked for: clients send steps ahead.
            if seq <= facts["seq"] - KEPT_RESULTS:
                path.unlink()

    def state(self) -> tuple[dict[str, Tensor], Facts]:
        """Tensors and facts of the last :meth:`write_state`."""
        with safe_open(self.directory / _STATE, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, json.loads(file.metadata()["facts"])

    def state_facts(self) -> Facts | None:
        """Facts of the last state; None where there is none."""
        if not (self.directory / _STATE).is_file():
            return None
        with safe_open(self.directory / _STATE, framework="pt") as file:
            facts: Facts = json.loads(file.metadata()["facts"])
            return facts

    def log(self, seq: int, kind: str, body: bytes) -> None:
        """Keep a request before it is acknowledged."""
        _replace(self._log / f"{seq:08d}.{kind}", body)

    def request(self, seq: int) -> bytes:
        """The body of a ``forward_backward`` that is logged."""
        return (self._log / f"{seq:08d}.forward_backward").read_bytes()

    def logged(self) -> Iterator[tuple[int, str, bytes]]:
        """Number, kind and body of the requests since the last state, in order."""
        for seq, path in self._numbered(self._log):
            yield seq, path.suffix[1:], path.read_bytes()

    def write_result(self, seq: int, kind: str, body: bytes) -> None:
        """Keep what a request has given."""
        place = self._results / f"{seq:08d}.{kind}"
        _replace(place, body)
        for other in self._results.glob(f"{seq:08d}.*"):
            if other != place:  # of a request that failed when its result was there already
                other.unlink()

    def result(self, seq: int) -> tuple[str, bytes] | None:
        """Kind and body of what a request has given, where it is still kept."""
        for path in self._results.glob(f"{seq:08d}.*"):
            return path.suffix[1:], path.read_bytes()
        return None

    @staticmethod
    def _numbered(directory: Path) -> list[tuple[int, Path]]:
        return sorted((int(path.stem), path) for path in directory.glob("[0-9]*.*"))

    def weights(self, kind: str, name: str | None) -> Weights:
        """Weights of this run under a name; None stands for the next number that is free.

        Raises:
            ValueError: if it is no name.
        """
        if name is None:
            taken = {path.name for path in (self.directory / kind).glob("*")}
            name = next(str(n) for n in range(len(taken) + 1) if str(n) not in taken)
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"path must be a name of letters, digits, '.', '_' and '-', got {name!r:.80}"
            )
        return Weights(self.run, kind, name)

    def place(self, weights: Weights) -> Path:
        """The directory of saved weights."""
        return self.directory / weights.kind / weights.name

    def change(self, weights: Weights, **facts: object) -> None:
        """Change what is known of saved weights."""
        file = self.place(weights) / CHECKPOINT_FILE
        with _CHANGING:
            write_whole(file, json.dumps(_read(file) | facts) + "\n")

    def delete(self, weights: Weights) -> None:
        """Delete saved weights: they are there whole, or not at all."""
        place = self.place(weights)
        gone = place.with_name(f".{weights.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def all_weights(self) -> list[tuple[Weights, Facts]]:
        """Saved weights that have a name, the oldest first, with their facts; expired ones go."""
        saved = []
        for kind in KINDS:
            for place in (self.directory / kind).glob("[!.]*"):
                with suppress(FileNotFoundError):  # one that is replaced at this moment
                    facts = _read(place / CHECKPOINT_FILE)
                    if _is_over(facts):
                        shutil.rmtree(place, ignore_errors=True)
                    else:
                        saved.append((Weights(self.run, kind, place.name), facts))
        return sorted(saved, key=lambda each: each[1]["time"])

    def drop_unnamed(self) -> set[str]:
        """Delete all but the last few weights without a name; their paths."""
        places = (self.directory / "sampler_weights").glob(f"{UNNAMED}*")
        numbered = sorted(places, key=lambda path: int(path.name.removeprefix(UNNAMED)))
        gone = numbered[:-KEPT_UNNAMED]
        for place in gone:
            shutil.rmtree(place, ignore_errors=True)
        return {Weights(self.run, "sampler_weights", place.name).path for place in gone}

    def append_metrics(self, line: Facts) -> None:
        """A line of ``metrics.jsonl``, which ``dschat-lora report`` reads."""
        with open_in_place(self.directory / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")


class Store:
    """The directory of ``--state_dir``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "runs").mkdir(parents=True, exist_ok=True)

    def run(self, run: str) -> RunStore:
        """The directory of a run."""
        return RunStore(self.directory / "runs" / run.replace(":", "_"), run)

    def place(self, path: str) -> Path:
        """The directory of the weights at a ``tinker://`` path."""
        weights = parse_path(path)
        return self.run(weights.run).place(weights)

    def runs(self) -> Iterator[RunStore]:
        """Of all runs."""
        for path in sorted((self.directory / "runs").glob("*/run.json")):
            yield RunStore(path.parent, _read(path)["model_id"])

    def table(self, name: str) -> dict[str, Facts]:
        """A table of facts by id, such as ``sessions``."""
        path = self.directory / f"{name}.json"
        return _read(path) if path.is_file() else {}

    def write_table(self, name: str, table: Mapping[str, Facts]) -> None:
        """Write it whole."""
        write_whole(self.directory / f"{name}.json", json.dumps(table, indent=1) + "\n")


def _replace(path: Path, body: bytes) -> None:
    """Write a file that appears whole; it outlives the process at once, the machine soon after."""
    check_place(path)
    staging = path.with_name(f".{path.name}.tmp")
    staging.unlink(missing_ok=True)  # it may be a link
    staging.write_bytes(body)
    staging.replace(path)


def size_of(directory: Path) -> int:
    """Bytes of the files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
