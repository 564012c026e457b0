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
from dschat_lora.addons.report.markup import number, safe
from dschat_lora.addons.report.run_data import read_run
from dschat_lora.addons.report.verdict import changes_of, doubts, title_of, what_was_trained
from dschat_lora.report.terminal import shown_by
from dschat_lora.report.texts import duration, short

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

# A curve shows the first of these that a line has.
TRAIN_METRICS = ("reward", "accuracy", "loss")
_EVAL_METRICS = ("perplexity", "accuracy", "reward", "greedy_reward", "judge", "kl", "loss")
_WIDTH, _HEIGHT, _MARGIN = 480, 110, 4
_MOST_POINTS, _MOST_SAMPLES = 300, 3

Points = list[tuple[str, float, float]]  # name of the quantity, step, value
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


def box(*parts: str) -> str:
    """What is shown of a run; ``parts`` are HTML."""
    return f'<div style="max-width:54em;line-height:1.5">{"".join(parts)}</div>'


def items(texts: Sequence[str]) -> str:
    """A list of texts."""
    return f"<ul>{''.join(f'<li>{safe(text)}</li>' for text in texts)}</ul>" if texts else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, which keep their lines; empty without rows."""
    if not rows:
        return ""
    style = 'style="text-align:left;vertical-align:top;white-space:pre-wrap"'
    head = "".join(f"<th {style}>{safe(cell)}</th>" for cell in header)
    body = "".join(
        f"<tr>{''.join(f'<td {style}>{safe(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def eval_table(evals: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last of the evaluations, with what they measured."""
    names = [n for n in _EVAL_METRICS if any(not math.isnan(number(e.get(n))) for e in evals)]
    shown = [evals[0], evals[-1]] if len(evals) > 1 else evals
    rows = [
        [f"after step {short(number(e.get('step')))}", *(short(number(e.get(n))) for n in names)]
        for e in shown
    ]
    return table(["held-out", *(name.replace("_", " ") for name in names)], rows if names else [])


def point(line: Mapping[str, Any]) -> Points:
    """The point that a line of training adds to the curve; empty where nothing is finite."""
    for name in TRAIN_METRICS:
        if name in line:
            step, value = number(line.get("step")), number(line[name])
            return [] if math.isnan(step + value) else [(name, step, value)]
    return []


def curve_html(points: Points) -> str:
    """A curve and its range in words; empty with fewer than two points.

    The words stay where a viewer of notebooks leaves out pictures.
    """
    if len(points) < 2:
        return ""
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
    return (
        f'<svg role="img" aria-label="{safe(words)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="display:block;width:100%;max-width:{_WIDTH}px;border-left:1px solid;'
        'border-bottom:1px solid;border-color:currentColor">'
        f'<polyline points="{path}" fill="none" stroke="#4a86e8" stroke-width="2"/></svg>'
        f"<div><small>{safe(words)}</small></div>"
    )


def run_html(home: Path, *, status: str, path: Path) -> str:
    """``Run._repr_html_``: what was trained, what changed, its curve, evaluations and answers."""
    run = read_run(home)
    answers: dict[str, dict[str, str]] = {}  # to held-out prompts, before and after training
    for answer in run.answers:
        by_time = answers.setdefault(str(answer.get("prompt", "")).strip(), {})
        by_time[str(answer.get("when"))] = str(answer.get("answer", "")).strip()
    rows = [
        [prompt, each.get("before", ""), each.get("after", "")]
        for prompt, each in [*answers.items()][:_MOST_SAMPLES]
    ]
    changes = [change.words for change in changes_of(run)]
    return box(
        f"<b>{safe(title_of(run.name))}</b>: {safe(status)}, <code>{safe(path)}</code>",
        f"<div>{safe(what_was_trained(run))}</div>" if run.facts else "",
        items([*changes, *(f"Look at this: {words}" for words, _ in doubts(run))]),
        curve_html([p for line in run.train for p in point(line)]),
        eval_table(run.evals),
        table(["prompt", "answer before", "answer after"], rows),
    )
