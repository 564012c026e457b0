"""Runs in a notebook: a bar and a curve that grow in the cell while a run goes on."""

import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_lora.api.notebook_html import (
    TRAIN_METRICS,
    Points,
    box,
    curve_html,
    eval_table,
    items,
    point,
)
from dschat_lora.report.markup import duration, safe, short
from dschat_lora.report.terminal import shown_by
from dschat_lora.report.verdict import TITLES

_SECONDS = 0.5  # between two pictures
_MOST_LINES = 200  # that a run prints beside its metrics, and that are kept
_SHOWN = ("epoch", *TRAIN_METRICS, "kl", "response_length", "lora_learning_rate")


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def quieten_libraries() -> None:
    """Let libraries that are yet to be imported warn of nothing that a notebook's run concerns."""
    if not in_notebook():
        return
    warnings.filterwarnings("ignore", "IProgress not found")  # no bar of a library is shown


@contextmanager
def shown_in_notebook(stage: str, *, quiet: bool) -> Iterator[None]:
    """A block whose run is shown in the cell, in the place of lines, if this is a notebook."""
    if quiet or not in_notebook():
        yield
        return
    view = NotebookView(stage)
    try:
        with shown_by(view):
            yield
    except BaseException as error:
        view.end("stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")
        raise
    view.end("finished")


class NotebookView:
    """An output of a cell that is replaced while the run goes on.

    Notes and warnings stay in sight; other lines of the run are folded.
    """

    def __init__(self, stage: str) -> None:
        self._title = TITLES.get(stage, stage)
        self._display: Any = None  # made by the first line: wrong options show nothing
        self._shown_at = -math.inf
        self._start = time.monotonic()
        self._status = "begins"
        self._total = self._done = self._first = 0
        self._train: dict[str, Any] = {}
        self._evals: list[dict[str, Any]] = []
        self._curve: Points = []
        self._lines: list[str] = []
        self._notes: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line of the run; notes and warnings are shown, other lines folded."""
        text = text.replace(f"{Path.cwd()}/", "")
        name, _, rest = text.strip().partition(" ")
        if name in ("note", "warning"):
            words = rest.strip() if name == "note" else f"Warning: {rest.strip()}"
            self._notes += [words] if words not in self._notes else []
        elif len(self._lines) < _MOST_LINES:
            self._lines.append(text)
        self._refresh(at_once=name == "warning")

    def expect(self, total_steps: int, done: int) -> None:
        """Show a bar of so many steps."""
        self._total, self._first, self._done = total_steps, done, done
        self._status, self._start = "", time.monotonic()
        self._refresh(at_once=True)

    def add(self, kind: str, metrics: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl."""
        if kind == "train":
            self._done += self._total > 0
            self._train = dict(metrics)
            self._curve += point(metrics)
        elif kind == "eval":
            # The first and the last one are shown.
            self._evals = [*self._evals[:1], dict(metrics)]
        self._refresh(at_once=kind == "eval")

    def end(self, status: str) -> None:
        """Show the run for the last time."""
        self._status = status
        if self._display is not None:
            self._refresh(at_once=True)

    def _refresh(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not at_once and now - self._shown_at < _SECONDS:
            return
        self._shown_at = now
        content = {"text/html": self.html(), "text/plain": f"{self._title}: {self._progress()}"}
        if self._display is None:
            from IPython.display import display

            self._display = display(content, raw=True, display_id=True)
        else:
            self._display.update(content, raw=True)

    def _progress(self) -> str:
        """How far the run is, in words."""
        if not self._total:
            return self._status
        steps = f"step {self._done:,} of {self._total:,}"
        seconds, made = time.monotonic() - self._start, self._done - self._first
        if self._status:
            return f"{self._status}, {steps}, {duration(seconds)}"
        if not made:
            return steps
        return f"{steps}, about {duration(seconds / made * (self._total - self._done))} left"

    def html(self) -> str:
        """The run so far."""
        numbers = {n: self._train[n] for n in _SHOWN if isinstance(self._train.get(n), int | float)}
        words = ", ".join(f"{n.replace('_', ' ')} {short(value)}" for n, value in numbers.items())
        bar = (
            f'<progress max="{self._total}" value="{self._done}" style="width:100%" '
            f'aria-label="{safe(self._progress())}"></progress>'
        )
        folded = safe("\n".join(self._lines))
        return box(
            f"<b>{safe(self._title)}</b>: {safe(self._progress())}",
            bar if self._total and not self._status else "",
            f"<div>{safe(words)}</div>" if words and not self._status else "",
            curve_html(self._curve),
            eval_table(self._evals),
            items(self._notes),
            f"<details><summary>What the run says</summary><pre>{folded}</pre></details>"
            if folded
            else "",
        )
