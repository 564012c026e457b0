"""Values of runs as text and as numbers, and text for HTML."""

import json
import math
import re
from collections.abc import Mapping
from html import escape

HUGE = 1e100  # nothing in training is that large; sums of larger numbers would overflow


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
