"""Line charts and stacked bars as inline SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dschat_lora.report.markup import HUGE, safe, short

WIDTH, HEIGHT = 400, 210
TOP, BOTTOM, BAR = 12, 40, 46
MOST_POINTS = 400
MOST_DOTS = 25
CHAR_WIDTH = 7.4  # of a digit at the charts' font size

STYLE = """
:root { --c0: #0072b2; --c1: #c24e00; --c2: #9a3f8f; --c3: #757575; --grid: #dcdfe3; }
@media (prefers-color-scheme: dark) {
  :root { --c0: #56b4e9; --c1: #f0a143; --c2: #dd8fd0; --c3: #9aa0a6; --grid: #363c43; }
}
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12.5px; fill: var(--muted); font-variant-numeric: tabular-nums; }
svg text.value { fill: var(--text); font-weight: 600; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); } .axis { stroke: var(--muted); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 5 4; } .mark { fill: var(--warning); }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); } .s2 { stroke: var(--c2); }
.s3 { stroke: var(--c3); }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; padding: 0; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.legend svg { width: 26px; flex: none; }
"""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: ``(step, value)`` in order of the steps; NaN is a gap."""

    label: str
    points: Points
    color: int = 0
    dashed: bool = False

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """The points that have a value."""
        return [point for point in self.points if not math.isnan(point[1])]

    @property
    def style(self) -> str:
        """Classes of the line."""
        return f"line s{self.color}{' dashed' if self.dashed else ''}"


@dataclass(frozen=True)
class _Frame:
    """Axes: the map from steps and values to the picture's coordinates."""

    steps: tuple[float, float]
    values: tuple[float, float]
    left: float
    right: float

    def x(self, step: float) -> float:
        low, high = self.steps
        return self.left + (step - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.values
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP)


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` of the points; least, greatest, first, last values and gaps stay.

    Each of equal stretches keeps its least and its greatest value and, if it has one, a gap.
    """
    if len(points) <= most:
        return list(points)
    stretches = (most - 2) // 3
    edges = [round(i * len(points) / stretches) for i in range(stretches + 1)]
    kept = {0, len(points) - 1}
    for first, last in pairwise(edges):
        here = range(first, last)
        values = [i for i in here if not math.isnan(points[i][1])]
        kept.update(next(([i] for i in here if math.isnan(points[i][1])), []))
        if values:
            kept.add(min(values, key=lambda i: points[i][1]))
            kept.add(max(values, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def ticks(low: float, high: float, *, about: int = 4, least: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], ``least`` or more apart."""
    wanted = (high - low) / about
    power = 10.0 ** math.floor(math.log10(wanted))
    distance = max(least, next((m * power for m in (1, 2, 5) if m * power >= wanted), 10 * power))
    first, last = math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9)
    return [k * distance for k in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of ticks, all with as many decimals as tell them apart."""
    distance = min((b - a for a, b in pairwise(values)), default=1.0)
    if max(map(abs, values), default=0.0) >= 1e7 or distance < 1e-4:
        return [f"{value:.3g}" for value in values]
    decimals = max(0, -math.floor(math.log10(distance) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


def bounds(values: Sequence[float], *, top: float = math.inf) -> tuple[float, float]:
    """The range of an axis: a little more than that of finite values, around them if all equal.

    ``top`` is the greatest possible value.
    """
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    pad = 0.05 * (high - low)
    if high - low <= max(1e-6 * size, 1 / HUGE):
        pad = 0.1 * size if size > 1 / HUGE else 1.0
    bottom = 0.0 if low >= 0 else -math.inf
    return max(low - pad, bottom), min(high + pad, max(top, high))


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    key: str,
    unit: str = "",
    top: float = math.inf,
    marks: Sequence[float] = (),
) -> str:
    """A figure with curves over steps; empty if no curve has a value.

    ``key`` is unique in the document, a prefix of ids; ``top`` the greatest possible value;
    ``marks`` are steps to point at.
    """
    curves = [curve for curve in curves if curve.drawn]
    if not curves:
        return ""
    frame = _frame(curves, top)
    parts = _axes(frame)
    for curve in curves:
        parts += _curve(curve, frame)
    parts += _last_values(curves, frame)
    pixels = {round(frame.x(step)) for step in marks if frame.steps[0] <= step <= frame.steps[1]}
    foot = HEIGHT - BOTTOM
    parts += [f'<path class="mark" d="M{x} {foot - 7}l-5 8h10z"/>' for x in sorted(pixels)]
    words = " ".join(map(_description, curves))
    legend = _legend([(c.label, f'<path class="{c.style}" d="M1 6H25"/>') for c in curves])
    gaps = "; ".join(filter(None, map(_gaps, curves)))
    note = f'<p class="words">{safe(gaps)}</p>' if gaps else ""
    return (
        f"<figure>{_caption(title, unit)}{legend if len(curves) > 1 else ''}"
        f"{_picture(parts, title=title, words=words, key=key, height=HEIGHT)}"
        f"{note}</figure>"
    )


def _frame(curves: Sequence[Curve], top: float) -> _Frame:
    """The frame that holds the curves, with room for the labels of the value axis."""
    steps = [step for curve in curves for step, _ in curve.points]
    values = bounds([value for curve in curves for _, value in curve.drawn], top=top)
    first, last = min(steps), max(steps)
    if first == last:
        first, last = first - 1, last + 1
    labels = tick_labels(ticks(*values))
    ends = [short(curve.drawn[-1][1]) for curve in curves]
    left = 10 + CHAR_WIDTH * max(map(len, labels), default=0)
    right = WIDTH - 12 - CHAR_WIDTH * max(map(len, ends))
    return _Frame((first, last), values, left, right)


def _axes(frame: _Frame) -> list[str]:
    foot = HEIGHT - BOTTOM
    parts = []
    values = ticks(*frame.values)
    for value, label in zip(values, tick_labels(values), strict=True):
        y = frame.y(value)
        parts += [
            f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>',
            f'<text class="end" x="{frame.left - 6:.1f}" y="{y + 4:.1f}">{label}</text>',
        ]
    parts.append(f'<path class="axis" d="M{frame.left:.1f} {foot}H{frame.right:.1f}"/>')
    steps = ticks(*frame.steps, least=1.0)
    for step, label in zip(steps, tick_labels(steps), strict=True):
        x = frame.x(step)
        parts += [
            f'<path class="axis" d="M{x:.1f} {foot}v4"/>',
            f'<text class="middle" x="{x:.1f}" y="{foot + 18}">{label}</text>',
        ]
    middle = (frame.left + frame.right) / 2
    parts.append(f'<text class="middle" x="{middle:.1f}" y="{HEIGHT - 5}">step</text>')
    return parts


def _curve(curve: Curve, frame: _Frame) -> list[str]:
    """The line, broken at gaps, and a dot for each value if they are few."""
    moves, pen_up = [], True
    for step, value in thin(curve.points):
        if not math.isnan(value):
            # A line of no length is drawn as a dot: a lone value between gaps is seen.
            moves.append(f"{'M' if pen_up else 'L'}{frame.x(step):.1f} {frame.y(value):.1f}")
            moves.append("h0" if pen_up else "")
        pen_up = math.isnan(value)
    parts = [f'<path class="{curve.style}" d="{"".join(moves)}"/>']
    if len(curve.drawn) <= MOST_DOTS:
        parts += [
            f'<circle class="f{curve.color}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" '
            f'r="3.5"><title>{safe(curve.label)}, step {short(step)}: {short(value)}</title>'
            "</circle>"
            for step, value in curve.drawn
        ]
    return parts


def _last_values(curves: Sequence[Curve], frame: _Frame) -> list[str]:
    """A label with the last value of each curve, without overlaps."""
    parts, above = [], -math.inf
    ends = sorted((frame.y(c.drawn[-1][1]), c.color, c.drawn[-1]) for c in curves)
    for y, color, (step, value) in ends:
        above = max(y, above + 15)
        parts += [
            f'<circle class="f{color}" cx="{frame.x(step):.1f}" cy="{y:.1f}" r="3.5"/>',
            f'<text class="value" x="{frame.right + 8:.1f}" y="{above + 4:.1f}">'
            f"{short(value)}</text>",
        ]
    return parts


def _description(curve: Curve) -> str:
    """A text alternative of a curve."""
    (first, start), (last, end) = curve.drawn[0], curve.drawn[-1]
    values = [value for _, value in curve.drawn]
    words = f"{curve.label}: {short(start)} at step {short(first)}"
    if len(values) > 1:
        words += (
            f", {short(end)} at step {short(last)}; "
            f"between {short(min(values))} and {short(max(values))}"
        )
    return f"{words}."


def _gaps(curve: Curve) -> str:
    """The number of values that a curve lacks; empty if none."""
    missing = len(curve.points) - len(curve.drawn)
    return f"{curve.label}: {missing:,} of {len(curve.points):,} values not finite" * (missing > 0)


def stacked_bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    *,
    key: str,
    names: Sequence[str],
    format_value: Callable[[float], str],
) -> str:
    """A figure with one bar a row, of parts that add up; empty if there is nothing to add.

    ``rows`` are names and parts, 0 or more, of the bars; empty ones are left out. ``key`` is
    unique in the document, a prefix of ids; ``names`` are those of the parts in the order of their
    colours.
    """
    rows = [(label, amounts) for label, amounts in rows if any(amounts.values())]
    if not rows:
        return ""
    longest = max(sum(amounts.values()) for _, amounts in rows)
    parts, words, used = [], [], set()
    for row, (label, amounts) in enumerate(rows):
        x, y, total = 0.0, row * BAR, sum(amounts.values())
        name = label if len(label) <= 30 else label[:29] + "\u2026"
        parts.append(f'<text x="0" y="{y + 13}">{safe(name)}</text>')
        parts.append(
            f'<text class="value end" x="{WIDTH}" y="{y + 13}">{safe(format_value(total))}</text>'
        )
        for part, amount in amounts.items():
            if not amount:
                continue
            width = amount / longest * WIDTH
            hint = f"{label}, {part}: {format_value(amount)}"
            parts.append(
                f'<rect class="f{names.index(part) % 4}" x="{x:.1f}" y="{y + 19}" '
                f'width="{max(width - 1.5, 0.5):.1f}" height="16">'
                f"<title>{safe(hint)}</title></rect>"
            )
            words.append(f"{hint}.")
            used.add(part)
            x += width
    sample = '<rect class="f{}" width="26" height="12"/>'
    legend = _legend([(n, sample.format(i % 4)) for i, n in enumerate(names) if n in used])
    picture = _picture(
        parts, title=title, words=" ".join(words), key=key, height=len(rows) * BAR - 8
    )
    return f"<figure>{_caption(title, '')}{legend}{picture}</figure>"


def _caption(title: str, unit: str) -> str:
    small = f" <small>{safe(unit)}</small>" if unit else ""
    return f"<figcaption>{safe(title)}{small}</figcaption>"


def _picture(parts: Sequence[str], *, title: str, words: str, key: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{key}-title" '
        f'aria-describedby="{key}-words"><title id="{key}-title">{safe(title)}</title>'
        f'<desc id="{key}-words">{safe(words)}</desc>{"".join(parts)}</svg>'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{sample}</svg>{safe(label)}</li>'
        for label, sample in entries
    )
    return f'<ul class="legend">{items}</ul>'
