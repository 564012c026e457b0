"""HTML of runs for the cells of a notebook, in the colours that the notebook has."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.report.curves import thin
from dschat_lora.report.markup import number, safe, short
from dschat_lora.report.run_data import RunData
from dschat_lora.report.verdict import TITLES, changes_of, doubts, what_was_trained

# A curve shows the first of these that a line has.
TRAIN_METRICS = ("reward", "accuracy", "loss")
_EVAL_METRICS = ("perplexity", "accuracy", "reward", "greedy_reward", "judge", "kl", "loss")
_WIDTH, _HEIGHT, _MARGIN = 480, 110, 4
_MOST_POINTS, _MOST_SAMPLES = 300, 3

Points = list[tuple[str, float, float]]  # name of the quantity, step, value


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


def run_html(story: RunData, *, status: str, path: Path) -> str:
    """A run that has ended: what was trained, what changed, its curve, evaluations and answers."""
    found = [change.words for change in changes_of(story)]
    return box(
        f"<b>{safe(TITLES.get(story.name, story.name))}</b>: {safe(status)}, "
        f"<code>{safe(path)}</code>",
        f"<div>{safe(what_was_trained(story))}</div>" if story.facts else "",
        items([*found, *(f"Look at this: {words}" for words, _ in doubts(story))]),
        curve_html([p for line in story.train for p in point(line)]),
        eval_table(story.evals),
        table(["prompt", "answer before", "answer after"], _answers(story)),
    )


def _answers(story: RunData) -> list[list[str]]:
    """Held-out prompts with the answers before and after training."""
    found: dict[str, dict[str, str]] = {}
    for answer in story.answers:
        by_time = found.setdefault(str(answer.get("prompt", "")).strip(), {})
        by_time[str(answer.get("when"))] = str(answer.get("answer", "")).strip()
    return [
        [prompt, each.get("before", ""), each.get("after", "")]
        for prompt, each in [*found.items()][:_MOST_SAMPLES]
    ]
