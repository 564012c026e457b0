"""Charts of a stage: places for a script to draw in, the same in words and numbers, and JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.report.markup import html_table, number, safe, short
from dschat_lora.report.metrics import (
    METRICS,
    MOST_POINTS,
    MOST_POINTS_OF_A_CURVE,
    Curve,
    Metric,
    curves_of,
    describe,
    flat_words,
    further_metrics,
    thin,
)
from dschat_lora.report.story import StageStory

Json = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A quantity of runs of one stage."""

    metric: Metric
    curves: Sequence[Curve]
    names: Sequence[str]  # of the runs
    marks: Sequence[float]  # steps of warnings
    group: int  # of the stage

    def name_of(self, curve: Curve) -> str:
        """What a curve is called."""
        return _name(curve, self.names)


def _name(curve: Curve, names: Sequence[str]) -> str:
    """Where a curve is from, and of which run if there are several."""
    return curve.source if len(names) < 2 else f"{names[curve.run]}, {curve.source}"


def charts_of(stories: Sequence[StageStory], group: int) -> tuple[list[Chart], list[str]]:
    """Charts of runs of one stage, and sentences on what stays the same."""
    charts, flat = [], []
    names = [story.label for story in stories]
    warnings = (e for story in stories for e in story.events if e.get("event") == "warning")
    marks = sorted({s for e in warnings if not math.isnan(s := number(e.get("step")))})
    for metric in (*METRICS, *further_metrics(stories)):
        of_policy = any("policy_loss" in line for story in stories for line in story.train[:1])
        if metric.train == "loss" and of_policy:
            continue  # the same under another name
        if not (curves := curves_of(stories, metric)):
            continue
        if words := flat_words(metric, curves, [_name(curve, names) for curve in curves]):
            flat.append(words)
        else:
            charts.append(Chart(metric, curves, names, marks[:200], group))
    return sorted(charts, key=lambda chart: chart.metric.folded), flat


def charts_section(charts: Sequence[Chart], flat: Sequence[str], *, first: int) -> str:
    """HTML of a stage's charts, of which number ``first`` of the page is the first one."""
    if not charts and not flat:
        return "<p>No curves: no metrics.</p>"
    figures = [_figure(chart, first + n) for n, chart in enumerate(charts)]
    shown = sum(not chart.metric.folded for chart in charts)
    parts = []
    if charts:
        parts.append(_controls(charts[0]))
        parts.append(f'<div class="charts">{"".join(figures[:shown])}</div>')
        if figures[shown:]:
            more = f'<div class="charts">{"".join(figures[shown:])}</div>'
            parts.append(f"<details><summary>More curves</summary>{more}</details>")
        rows = [row for chart in charts for row in _numbers(chart)]
        table = html_table(
            ["quantity", "first", "last", "least", "at step", "greatest", "at step"],
            rows,
            kind="numbers",
        )
        parts.append(
            f'<details class="open" open><summary>Curves as numbers</summary>{table}</details>'
        )
    if flat:
        items = "".join(f"<li>{safe(words)}</li>" for words in flat)
        parts.append(f'<div class="flat"><h3>Without a chart</h3><ul>{items}</ul></div>')
    return "".join(parts)


def _controls(chart: Chart) -> str:
    """Smoothing and, of several runs, which to show; for the script."""
    runs = "".join(
        f'<label class="run c{n % 6}"><input type="checkbox" data-run="{n}" checked>'
        f"<i></i><bdi>{safe(name)}</bdi></label>"
        for n, name in enumerate(chart.names)
    )
    return (
        f'<div class="controls" data-group="{chart.group}" hidden><label>Smoothing '
        '<input type="range" min="0" max="0.98" step="0.02"></label>'
        f"{runs if len(chart.names) > 1 else ''}"
        "<small>Solid: training, dashed: held-out. Drag to zoom, double-click to go back.</small>"
        "</div>"
    )


def _figure(chart: Chart, index: int) -> str:
    unit = f" <small>{safe(chart.metric.unit)}</small>" if chart.metric.unit else ""
    words = " ".join(describe(curve, chart.name_of(curve)) for curve in chart.curves)
    gaps = "; ".join(filter(None, (_gaps(chart, curve) for curve in chart.curves)))
    note = f'<p class="words">{safe(gaps)}</p>' if gaps else ""
    return (
        f"<figure><figcaption>{safe(chart.metric.title)}{unit}</figcaption>"
        f'<div class="plot" role="img" data-chart="{index}" '
        f'aria-label="{safe(chart.metric.title)}. {safe(words)}"></div>'
        f'<p class="values" aria-hidden="true"></p>{note}</figure>'
    )


def _gaps(chart: Chart, curve: Curve) -> str:
    """The number of values that a curve lacks; empty if none."""
    missing = len(curve.values) - len(curve.finite)
    words = f"{chart.name_of(curve)}: {missing:,} of {len(curve.values):,} values not finite"
    return words if missing else ""


def _numbers(chart: Chart) -> list[list[str]]:
    rows = []
    for curve in chart.curves:
        points = curve.finite
        ends = [short(points[0][1]), short(points[-1][1])]
        for step, value in (min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])):
            ends += [short(value), short(step)]
        rows.append([f"{chart.metric.title}, {chart.name_of(curve)}", *ends])
    return rows


def chart_data(charts: Sequence[Chart]) -> list[Json]:
    """The charts as JSON for the script, thinned where they hold very many points."""
    count = sum(len(chart.curves) for chart in charts)
    most = max(50, min(MOST_POINTS_OF_A_CURVE, MOST_POINTS // max(1, count)))
    return [
        {
            "group": chart.group,
            "percent": chart.metric.share,
            "marks": list(chart.marks),
            "curves": [
                {"name": chart.name_of(c), "run": c.run, "held": c.held_out, **_points(c, most)}
                for c in chart.curves
            ],
        }
        for chart in charts
    ]


def _points(curve: Curve, most: int) -> Mapping[str, list[float | None]]:
    kept = thin(curve.values, most)
    columns = {"x": curve.steps, "y": curve.values}
    columns |= {} if curve.errors is None else {"e": curve.errors}
    return {key: [_rounded(values[i]) for i in kept] for key, values in columns.items()}


def _rounded(value: float) -> float | None:
    """Five digits; None for NaN."""
    if math.isnan(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.5g}")
