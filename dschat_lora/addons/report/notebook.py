"""Runs in a notebook: the HTML of one that goes on, which grows in its cell, and of one that ended.

It has the colours that the notebook has.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.report.curves import thin
from dschat_lora.addons.report.html import environment
from dschat_lora.addons.report.markup import number
from dschat_lora.addons.report.run_data import read_run
from dschat_lora.addons.report.verdict import changes_of, doubts, title_of, what_was_trained
from dschat_lora.report.terminal import shown_by
from dschat_lora.report.texts import as_written, duration, short

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

# A curve shows the first of these that a line has.
TRAIN_METRICS = ("reward", "accuracy", "loss")
_EVAL_METRICS = ("perplexity", "accuracy", "reward", "greedy_reward", "judge", "kl", "loss")
_WIDTH, _HEIGHT, _MARGIN = 480, 110, 4  # of the picture in notebook.html
_MOST_POINTS, _MOST_SAMPLES = 300, 3

Points = list[tuple[str, float, float]]  # name of the quantity, step, value
Texts = Sequence[str]
Table = Sequence[Texts]
_SECONDS = 0.5  # between two pictures
_MOST_LINES = 200  # that a run prints beside its metrics, and that are kept
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
        view.end("stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed")
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
        return render(
            title=self._title,
            status=self._progress(),
            total=0 if self._status else self._total,
            done=self._done,
            words="" if self._status else words,
            items=self._notes,
            curve=curve(self._curve),
            evaluations=eval_table(self._evals),
            folded=self._lines,
        )


def render(
    *,
    path: Path | None = None,
    total: int = 0,
    answers: Table = (),
    folded: Texts = (),
    **of: object,
) -> str:
    """What is shown of a run, by the template ``notebook.html``."""
    template = environment().get_template("notebook.html")
    return template.render(path=path, total=total, answers=answers, folded=folded, **of)


def eval_table(evals: Sequence[Mapping[str, Any]]) -> tuple[Texts, Table]:
    """Header and rows of the first and the last evaluation, with what they measured."""
    names = [n for n in _EVAL_METRICS if any(not math.isnan(number(e.get(n))) for e in evals)]
    shown = [evals[0], evals[-1]] if len(evals) > 1 else evals
    rows = [
        [f"after step {short(number(e.get('step')))}", *(short(number(e.get(n))) for n in names)]
        for e in shown
    ]
    return ["held-out", *(name.replace("_", " ") for name in names)], rows if names else []


def point(line: Mapping[str, Any]) -> Points:
    """The point that a line of training adds to the curve; empty where nothing is finite."""
    for name in TRAIN_METRICS:
        if name in line:
            step, value = number(line.get("step")), number(line[name])
            return [] if math.isnan(step + value) else [(name, step, value)]
    return []


def curve(points: Points) -> tuple[str, str] | None:
    """A curve's range in words, and its points in the picture; None with fewer than two points."""
    if len(points) < 2:
        return None
    name, values = points[0][0], [value for _, _, value in points]
    left, right, low, high = points[0][1], points[-1][1], min(values), max(values)
    width, span = (right - left) or 1.0, (high - low) or 1.0
    path = " ".join(
        f"{_MARGIN + (points[n][1] - left) / width * (_WIDTH - 2 * _MARGIN):.1f},"
        f"{_HEIGHT - _MARGIN - (values[n] - low) / span * (_HEIGHT - 2 * _MARGIN):.1f}"
        for n in thin(values, _MOST_POINTS)
    )
    words = (
        f"{name} of steps {short(left)} to {short(right)}: begins at {short(values[0])}, ends at "
        f"{short(values[-1])}; least {short(low)}, greatest {short(high)}"
    )
    return words, path


def run_html(home: Path, *, status: str, path: Path) -> str:
    """``Run._repr_html_``: what was trained, what changed, its curve, evaluations and answers."""
    run = read_run(home)
    answers: dict[str, dict[str, str]] = {}  # to held-out prompts, before and after training
    for answer in run.answers:
        by_time = answers.setdefault(as_written(str(answer.get("prompt", ""))), {})
        by_time[str(answer.get("when"))] = str(answer.get("answer", "")).strip()
    rows = [
        [prompt, each.get("before", ""), each.get("after", "")]
        for prompt, each in [*answers.items()][:_MOST_SAMPLES]
    ]
    changes = [change.words for change in changes_of(run)]
    return render(
        title=title_of(run.name),
        status=status,
        path=path,
        words=what_was_trained(run) if run.facts else "",
        items=[*changes, *(f"Look at this: {words}" for words, _ in doubts(run))],
        curve=curve([p for line in run.train for p in point(line)]),
        evaluations=eval_table(run.evals),
        answers=rows,
    )
