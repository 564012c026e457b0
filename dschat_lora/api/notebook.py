"""Runs in a notebook: a bar and a curve that grow while a run goes on, and a run that has ended."""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dschat_lora.report.markup import html_table, safe, short

if TYPE_CHECKING:
    from dschat_lora.api.runs import Run

# What a curve shows, and an evaluation is told by: the first of these that a line has.
_TRAIN = ("reward", "accuracy", "loss")
_EVAL = ("perplexity", "accuracy", "reward", "greedy_reward", "judge", "kl", "loss")
_SECONDS = 0.5  # between two pictures
_WIDTH, _HEIGHT = 480, 120
_MOST_SAMPLES = 3


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def shown_in_notebook(stage: str, *, quiet: bool) -> Iterator[Sequence[Any]]:
    """A block whose run is shown in the notebook's cell, by the callbacks that it gives."""
    if quiet or not in_notebook():
        yield ()
        return
    from IPython.display import HTML, display

    handle: Any = display(HTML(f"<p>{safe(stage)} begins</p>"), display_id=True)
    lines: list[dict[str, Any]] = []
    shown = 0.0

    def update(event: str, step: int, metrics: dict[str, Any]) -> None:
        nonlocal shown
        lines.append(metrics)
        if event != "train" or time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            handle.update(HTML(progress_html(stage, lines)))

    yield (update,)
    handle.update(HTML(progress_html(stage, lines)))


def progress_html(stage: str, lines: Sequence[dict[str, Any]]) -> str:
    """The curve of the lines so far, and the last of each kind in words."""
    train = [line for line in lines if line["kind"] == "train"]
    evals = [line for line in lines if line["kind"] == "eval"]
    parts = [f"<b>{safe(stage)}</b>"]
    if train:
        last = train[-1]
        names = ("epoch", *_TRAIN, "kl", "lora_learning_rate", "tokens_per_second")
        values = {n: last[n] for n in names if isinstance(last.get(n), int | float)}
        words = ", ".join(f"{n.replace('_', ' ')} {short(v)}" for n, v in values.items())
        parts.append(f"step {last['step']:,}: {safe(words)}")
    return "<br>".join(parts) + curve_svg(train) + _eval_table(evals)


def _eval_table(evals: Sequence[dict[str, Any]]) -> str:
    """Held-out results before training and at the last evaluation."""
    if not evals:
        return ""
    shown = [evals[0], evals[-1]] if len(evals) > 1 else [evals[0]]
    names = [n for n in _EVAL if isinstance(evals[0].get(n), int | float)]
    rows = [
        [f"step {line['step']}", *(short(line[n]) for n in names if n in line)] for line in shown
    ]
    return html_table(["held-out", *(n.replace("_", " ") for n in names)], rows)


def curve_svg(train: Sequence[dict[str, Any]]) -> str:
    """The reward, accuracy or loss over the steps; empty with fewer than two lines."""
    name = next((n for n in _TRAIN if train and n in train[-1]), "loss")
    points = [
        (float(line["step"]), float(line[name]))
        for line in train
        if isinstance(line.get(name), int | float) and math.isfinite(line[name])
    ]
    if len(points) < 2:
        return ""
    (left, right), values = (points[0][0], points[-1][0]), [y for _, y in points]
    low, high = min(values), max(values)
    span, width = (high - low) or 1.0, (right - left) or 1.0
    path = " ".join(
        f"{8 + (x - left) / width * (_WIDTH - 16):.1f},"
        f"{_HEIGHT - 22 - (y - low) / span * (_HEIGHT - 44):.1f}"
        for x, y in points
    )
    label = f"{name} over the steps: {short(values[0])} to {short(values[-1])}"
    return (
        f'<svg role="img" aria-label="{safe(label)}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="display:block;background:#fff">'
        f'<polyline points="{path}" fill="none" stroke="#3f51b5" stroke-width="1.5"/>'
        f'<g font-family="sans-serif" font-size="11" fill="#444">'
        f'<text x="8" y="14">{safe(name)}: {short(high)} at the top, {short(low)} below</text>'
        f'<text x="8" y="{_HEIGHT - 6}">step {left:,.0f}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{right:,.0f}</text></g></svg>'
    )


def run_html(run: "Run") -> str:
    """A run for a notebook: how it ended, its curve, its evaluations, and answers."""
    train = [line for line in run.metrics if line["kind"] == "train"]
    evals = [line for line in run.metrics if line["kind"] == "eval"]
    name = run.record.get("stage", "model")
    parts = [f"<b>{safe(str(name))}</b>: {safe(run.status)}, <code>{safe(str(run.path))}</code>"]
    parts += [curve_svg(train), _eval_table(evals)]
    answers = [a for a in run.record.get("answers", ()) if isinstance(a, dict)]
    rows = [
        [str(a.get("when", "")), str(a.get("prompt", "")), str(a.get("answer", ""))]
        for a in answers[: 2 * _MOST_SAMPLES]
    ]
    if rows:
        parts.append(html_table(["when", "prompt", "answer"], rows))
    return "".join(parts)
