"""Runs in a notebook: the HTML of one that goes on, which grows in its cell, and of one that ended.

It has the colours that the notebook has.
"""

import math
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.report.curves import thin
from dschat_lora.addons.report.html import environment
from dschat_lora.addons.report.markup import number
from dschat_lora.addons.report.run_data import read_run
from dschat_lora.addons.report.verdict import (
    CHANGE_HEADER,
    changes_of,
    doubts,
    name_of,
    title_of,
    what_was_trained,
)
from dschat_lora.config.plurals import counted
from dschat_lora.report.terminal import shown_by
from dschat_lora.report.texts import as_written, duration, short, without_end

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

# A curve shows the first of these that a line has.
TRAIN_METRICS = ("reward", "accuracy", "loss")
_EVAL_METRICS = ("perplexity", "accuracy", "reward", "greedy_reward", "judge", "kl", "loss")
_LABELS = {"loss": "loss (nats)"}  # of axes, other than the name of the metric
# Of the picture in notebook.html: where the axes cross, and where they end.
_LEFT, _BOTTOM, _RIGHT, _TOP = 56, 132, 472, 24
_MOST_POINTS, _MOST_SAMPLES = 300, 3

Points = list[tuple[str, float, float]]  # name of the quantity, step, value
Texts = Sequence[str]
Table = Sequence[Texts]
Ticks = list[tuple[float, str]]  # position in the picture, number
_SECONDS = 0.5  # between two pictures
_MOST_LINES = 200  # that a run prints beside its metrics, and that are kept
_MOST_REASON = 300  # characters of an error
_SHOWN = ("epoch", *TRAIN_METRICS, "kl", "response_length", "lora_learning_rate")


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


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
        if isinstance(error, KeyboardInterrupt | SystemExit):
            view.end("stopped")
        else:
            words = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            view.end("failed", textwrap.shorten(str(words), _MOST_REASON, placeholder=" ..."))
        raise
    view.end("finished")


class NotebookView:
    """An output of a cell that is replaced while the run goes on.

    Notes and warnings stay in sight; other lines of the run are folded.
    """

    def __init__(self, stage: str) -> None:
        self._title = title_of(stage)
        self._display: DisplayHandle | None = (
            None  # made by the first line: wrong options show nothing
        )
        self._shown_at = -math.inf
        self._start = time.monotonic()
        self._status = "begins"
        self._total = self._done = self._first = 0
        self._train: dict[str, Any] = {}
        self._evals: list[dict[str, Any]] = []
        self._iterations: dict[float, float] = {}
        self._curve: Points = []
        self._lines: list[str] = []
        self._notes: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line of the run; notes and warnings are shown, other lines folded."""
        text = _short_paths(text)
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
            self._iterations |= iterations_of([metrics])
            self._curve += point(metrics)
        elif kind == "eval":
            # The first and the last one are shown.
            self._evals = [*self._evals[:1], dict(metrics)]
        self._refresh(at_once=kind == "eval" and self._total > 0)

    def end(self, status: str, reason: str = "") -> None:
        """Show the run for the last time, with the ``reason`` of a failure."""
        self._status = status
        self._notes += [f"Error: {reason}"] if reason else []
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
        steps = f"{self._done:,} of {self._total:,}"
        if self._iterations:
            steps = f"iteration {steps}, {counted(int(max(self._iterations)), 'step')}"
        elif self._train:
            steps = f"step {steps}"
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
        if equal := self._train.get("equal_prompts"):
            words += f", prompts without signal {equal} of {self._train.get('prompts', '-')}"
        return render(
            title=self._title,
            status=self._progress(),
            total=0 if self._status else self._total,
            done=self._done,
            words="" if self._status else words,
            items=self._notes,
            curve=curve(self._curve),
            evaluations=eval_table(self._evals, self._iterations),
            folded=self._lines,
        )


def render(
    *,
    path: Path | None = None,
    total: int = 0,
    answers: tuple[Texts, Table] = ((), ()),
    folded: Texts = (),
    **of: object,
) -> str:
    """What is shown of a run, by the template ``notebook.html``."""
    template = environment().get_template("notebook.html")
    return template.render(path=path, total=total, answers=answers, folded=folded, **of)


def iterations_of(train: Iterable[Mapping[str, Any]]) -> dict[float, float]:
    """Iterations of RL by the optimizer steps made at their end; empty of other stages."""
    pairs = ((number(line.get("step")), number(line.get("iteration"))) for line in train)
    return {step: iteration for step, iteration in pairs if math.isfinite(step + iteration)}


def eval_table(
    evals: Sequence[Mapping[str, Any]], iterations: Mapping[float, float]
) -> tuple[Texts, Table]:
    """Header and rows of the first and the last evaluation, with what they measured."""

    def when(step: float) -> str:
        if not iterations:
            return f"after step {short(step)}"
        return f"after iteration {short(iterations.get(step, 0))}, step {short(step)}"

    names = [n for n in _EVAL_METRICS if any(not math.isnan(number(e.get(n))) for e in evals)]
    shown = [evals[0], evals[-1]] if len(evals) > 1 else evals
    rows = [
        [when(number(each.get("step"))), *(short(number(each.get(n))) for n in names)]
        for each in shown
    ]
    return ["held-out", *map(name_of, names)], rows if names else []


def point(line: Mapping[str, Any]) -> Points:
    """The point that a line of training adds to the curve; empty where nothing is finite."""
    for name in TRAIN_METRICS:
        if name in line:
            step, value = number(line.get("step")), number(line[name])
            return [] if math.isnan(step + value) else [(name, step, value)]
    return []


@dataclass(frozen=True)
class Picture:
    """A curve with numbers on its axes, in the coordinates of notebook.html."""

    label: str  # of the vertical axis
    words: str  # for those who do not see it
    path: str
    x_ticks: Ticks
    y_ticks: Ticks
    last: tuple[float, str]  # height of the last point, and its value


def curve(points: Points) -> Picture | None:
    """The curve through these points; None with fewer than two of them."""
    if len(points) < 2:
        return None
    name, steps, values = points[0][0], [p[1] for p in points], [p[2] for p in points]
    low, high = min(values), max(values)

    def place_x(step: float) -> float:
        return _LEFT + (step - steps[0]) / ((steps[-1] - steps[0]) or 1.0) * (_RIGHT - _LEFT)

    def place_y(value: float) -> float:
        return _BOTTOM - (value - low) / ((high - low) or 1.0) * (_BOTTOM - _TOP)

    return Picture(
        label=_LABELS.get(name, name),
        words=f"{name}: {short(values[0])} at step {short(steps[0])}, {short(values[-1])} at step "
        f"{short(steps[-1])}, between {short(low)} and {short(high)}",
        path=" ".join(
            f"{place_x(steps[n]):.1f},{place_y(values[n]):.1f}" for n in thin(values, _MOST_POINTS)
        ),
        x_ticks=[(place_x(x), short(x)) for x in ticks(steps[0], steps[-1], 6) if x == round(x)],
        y_ticks=[(place_y(y), short(y)) for y in ticks(low, high, 4)],
        last=(place_y(values[-1]), short(values[-1])),
    )


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` + 1 round numbers from ``low`` to ``high``, at equal distances."""
    if high - low <= 1e-12 * max(1e-30, abs(low), abs(high)):
        return [low]
    size = 10 ** math.floor(math.log10((high - low) / most))
    step = next(size * n for n in (1, 2, 5, 10) if (high - low) / (size * n) <= most)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def run_html(home: Path, *, status: str, path: Path) -> str:
    """``Run._repr_html_``: what was trained, what changed, its curve, evaluations and answers."""
    run = read_run(home)
    answers: dict[str, dict[str, str]] = {}  # to held-out prompts, before and after training
    for answer in run.answers:
        by_time = answers.setdefault(as_written(str(answer.get("prompt", ""))), {})
        by_time[str(answer.get("when"))] = without_end(str(answer.get("answer", "")))
    # A run that was stopped has none after training.
    times = [when for when in ("before", "after") if any(when in each for each in answers.values())]
    rows = [
        [prompt, *(each.get(when, "") for when in times)]
        for prompt, each in [*answers.items()][:_MOST_SAMPLES]
    ]
    iterations = iterations_of(run.train)
    changes = [change.row for change in changes_of(run)]
    html = render(
        title=title_of(run.name),
        status=status,
        path=path,
        words=what_was_trained(run) if run.facts else "",
        items=[f"Warning: {words}" for words, _ in doubts(run)],
        curve=curve([p for line in run.train for p in point(line)]),
        evaluations=(CHANGE_HEADER, changes) if changes else eval_table(run.evals, iterations),
        answers=(["prompt", *times], rows),
    )
    return _short_paths(html)  # of runs and models


def _short_paths(text: str) -> str:
    """The text with paths below the current directory relative to it."""
    try:
        here = re.escape(f"{Path.cwd()}/")
    except FileNotFoundError:  # it was removed
        return text
    return re.sub(rf"(?<![\w./-]){here}", "", text)
