"""Runs that have ended: their files, metrics and summary, and answers of what they trained."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dschat_lora.config.files import parse_json
from dschat_lora.models.source import find_model
from dschat_lora.report.directory import read_object
from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.story import read_stories, read_story


class Run:
    """A run that has ended, or a model that can be used like its result.

    Attributes:
        path: the directory; in Jupyter a run shows itself: metrics, samples and curves.
    """

    def __init__(self, path: str | Path, *, record: Mapping[str, Any] | None = None) -> None:
        """The run in a directory; ``record`` stands for its run.json, where it wrote none."""
        self.path = Path(path)
        if record is not None:
            self.record = dict(record)

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.status}>"

    @property
    def adapter(self) -> Path | None:
        """The directory of the adapter in PEFT's layout; None where a whole model was trained."""
        return find_model(str(self.path)).adapter

    @cached_property
    def record(self) -> dict[str, Any]:
        """The content of run.json: options, versions, counts; empty for what is no run."""
        return read_object(self._home / "run.json")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; empty for what is no run."""
        file = self._home / "metrics.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return [parse_json(line) for line in lines]

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
        """Answers to prompts; see :func:`dschat_lora.generate`."""
        from dschat_lora.api.verbs import generate

        return generate(self, prompts, **sampling)

    def report(self) -> Path:
        """The page about the run, written anew."""
        path = self._home / "report.html"
        write_report(path, render_report(self._home.resolve().name, read_stories([self._home]), {}))
        return path

    def _repr_html_(self) -> str:
        from dschat_lora.api.notebook_html import run_html

        return run_html(self, read_story(self._home))


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
    return Run(home)
