"""Runs that have ended: their files, metrics and summary, and answers of what they trained."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.api.notebook_html import run_html
from dschat_lora.api.process import on_first_process, run_in_process
from dschat_lora.api.verbs import generate
from dschat_lora.config.files import parse_json
from dschat_lora.models.source import find_model
from dschat_lora.report.directory import read_object
from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.run_data import read_run, read_runs


class Run:
    """A run that has ended, or a model that can be used like its result.

    In Jupyter it shows itself: how it ended, its curve, held-out results and answers.

    Attributes:
        path: the directory.
        record: the content of run.json: options, versions, counts; empty for what is no run.
        metrics: the lines of metrics.jsonl; empty for what is no run.
    """

    path: Path
    record: dict[str, Any]
    metrics: list[dict[str, Any]]

    def __init__(
        self, path: str | os.PathLike[str], *, record: Mapping[str, Any] | None = None
    ) -> None:
        """Read a directory; ``record`` stands for its run.json, where a run wrote none."""
        self.path = Path(path)
        file = self._home / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        self.record = dict(record or read_object(self._home / "run.json"))
        self.metrics = [parse_json(line) for line in lines if record is None]

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.status}>"

    @property
    def adapter(self) -> Path | None:
        """The directory of the adapter in PEFT's layout; None where a whole model was trained."""
        return find_model(str(self.path)).adapter

    @property
    def status(self) -> str:
        """``finished``, ``stopped``, or what run.json says of a run that ended otherwise."""
        status = str(self.record.get("status", "finished"))
        return "stopped" if status.startswith(("stopped", "interrupted")) else status

    @property
    def summary(self) -> dict[str, Any]:
        """``first`` and ``last``: the metrics of the evaluations before and after training."""
        evals = [line for line in self.metrics if line.get("kind") == "eval"]
        return {"first": evals[0], "last": evals[-1]} if evals else {}

    @property
    def _home(self) -> Path:
        """The directory with run.json: this one, or one above it."""
        homes = [self.path, *self.path.absolute().parents[:2]]
        return next((each for each in homes if (each / "run.json").is_file()), self.path)

    def generate(
        self, prompts: str | Sequence[str | Sequence[Mapping[str, str]]], **sampling: Any
    ) -> list[str]:
        """Answers to prompts; see ``dschat_lora.generate``."""
        return generate(self, prompts, **sampling)

    def report(self) -> Path:
        """The page about the run, written anew, by the first process of a launch."""
        path, title = self._home / "report.html", self._home.resolve().name
        with run_in_process():
            on_first_process(
                lambda: write_report(path, render_report(title, read_runs([self._home]), {}))
            )
        return path

    def _repr_html_(self) -> str:
        return run_html(read_run(self._home), status=self.status, path=self.path)


def load(path: str | Path) -> Run:
    """A finished run, an adapter, a merged model or a checkpoint by its directory.

    Args:
        path: directory, or the hub name of a model.

    Raises:
        ValueError: if nothing usable is there.
    """
    home = Path(path).expanduser()
    if not (home / "run.json").is_file():
        find_model(str(home) if home.exists() else str(path))
    return Run(home.absolute() if home.exists() else home)
