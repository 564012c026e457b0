"""Numbers, text and tables in the HTML of a report."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape

HUGE = 1e100  # nothing in training is that large; sums of larger numbers would overflow


def safe(value: object) -> str:
    """``value`` as text for HTML, between tags or in a quoted attribute.

    Characters that HTML cannot hold are replaced by visible ones: control characters by their
    pictures, halves of surrogate pairs and the rest by U+FFFD.
    """

    def visible(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    unfit = "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
    return escape(re.sub(unfit, visible, str(value)))


def number(value: object) -> float:
    """A number of a metrics line; NaN for what is none, is not finite or could not be drawn."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE:
        return float(value)
    return math.nan


def short(value: float) -> str:
    """A number with about four digits."""
    if math.isnan(value):
        return "-"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def amount(value: object) -> float:
    """A number that can be added up; 0 for anything else, or a negative one."""
    return 0.0 if math.isnan(number(value)) else max(number(value), 0.0)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours with their unit."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{minutes // 60} h {minutes % 60} min"


def operations(flops: float) -> str:
    """Floating-point operations with their unit."""
    if flops <= 0:
        return "-"
    for size, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= size:
            return f"{flops / size:,.3g} {name}"
    return f"{flops / 1e6:.3g} MFLOP"


def value_text(value: object) -> str:
    """A value of run.json or metrics.jsonl as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, list):
        return ", ".join(map(value_text, value)) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return "none" if value is None else str(value)


def meter(share: float, name: str) -> str:
    """A bar that is ``share``, in [0, 1], of its full length, as HTML."""
    return f'<meter value="{min(max(share, 0.0), 1.0):.4f}" aria-label="{safe(name)}"></meter>'


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    kind: str = "",
    markup: Collection[int] = (),
) -> str:
    """A table whose first column names the rows; empty without rows.

    Cells of the columns in ``markup`` are HTML, all others text.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{safe(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>'
        + "".join(
            f"<td>{cell if n in markup else safe(cell)}</td>" for n, cell in enumerate(row[1:], 1)
        )
        + "</tr>"
        for row in rows
        if row
    )
    title = f"<caption>{safe(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}">{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
