"""Numbers, texts and tokens as reports show them, in HTML or on a terminal."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

HUGE = 1e100  # nothing in training is that large; sums of larger numbers would overflow
_BOLD_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"


def safe(value: object) -> str:
    """``value`` as text for HTML, between tags or in a quoted attribute."""
    return escape(without_controls(value))


def without_controls(value: object) -> str:
    """``value`` as text with visible characters for those that HTML cannot hold.

    Control characters become their pictures, halves of surrogate pairs and the rest U+FFFD.
    """

    def picture(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"

    unfit = "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
    return re.sub(unfit, picture, str(value))


def number(value: object) -> float:
    """A number of a metrics line; NaN for what is none, is not finite or could not be drawn."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE:
        return float(value)
    return math.nan


def amount(value: object) -> float:
    """A number that can be added up; 0 for anything else, or a negative one."""
    return 0.0 if math.isnan(number(value)) else max(number(value), 0.0)


def short(value: float) -> str:
    """A number with about four digits."""
    if math.isnan(value):
        return "-"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.2e}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


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


def visible(token: str) -> str:
    """A token with its line ends and other control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def sample_text(tokens: Sequence[str], supervised: Sequence[int], *, colour: bool) -> str:
    """Tokens with a bar between them; supervised ones in green, or else in square brackets."""
    parts = []
    for token, counts in zip(map(visible, tokens), supervised, strict=True):
        if not counts:
            parts.append(f"{token}|")
        else:
            parts.append(f"{_BOLD_GREEN}{token}{_PLAIN}|" if colour else f"[{token}]")
    return "".join(parts)


def sample_html(tokens: Sequence[str], supervised: Sequence[int]) -> str:
    """The same as HTML: supervised tokens are marked."""
    parts = (
        f"<mark>{safe(token)}</mark>" if counts else f"<span>{safe(token)}</span>"
        for token, counts in zip(map(visible, tokens), supervised, strict=True)
    )
    return f'<p class="tokens">{"&#8203;".join(parts)}</p>'


def histogram(above: dict[str, int], total: int, *, width: int = 40) -> list[str]:
    """Lines of a histogram of lengths, from the number of rows above each limit."""
    counts, lines = [total, *above.values()], []
    for limit, (larger, rest) in zip(above, pairwise(counts), strict=True):
        bar = "#" * round(width * (larger - rest) / max(1, total))
        lines.append(f"  up to {int(limit):>7,} tokens {larger - rest:>9,} rows  {bar}".rstrip())
    return lines + ([f"  more                 {counts[-1]:>9,} rows"] if counts[-1] else [])
