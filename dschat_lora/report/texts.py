"""Numbers and tokens as a person reads them."""

import math
import re
from collections.abc import Sequence

# A prompt of one turn, in DeepSpeed-Chat's layout and in ChatML.
_ONE_TURN = re.compile(
    r"Human:((?:(?!\n\nAssistant:).)*)\n\nAssistant:"
    r"|<\|im_start\|>user\n((?:(?!<\|im_end\|>).)*)<\|im_end\|>\n<\|im_start\|>assistant",
    re.DOTALL,
)
# Tokens that end an answer, as most tokenizers write them.
_END = re.compile(r"(?:<\|[^<>|\s]*\|>|</s>|<eos>|<end_of_turn>)\s*$")
_BOLD_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"


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


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as of "0:03:21"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def operations(flops: float) -> str:
    """Floating-point operations with their unit."""
    if flops <= 0:
        return "-"
    for size, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= size:
            return f"{flops / size:,.3g} {name}"
    return f"{flops / 1e6:.3g} MFLOP"


def visible(token: str) -> str:
    """A token with its line ends and other control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def as_written(prompt: str) -> str:
    """A prompt without the space and, if it is a single turn, the role markers around it."""
    text = prompt.strip()
    turn = _ONE_TURN.fullmatch(text)
    return (turn[1] or turn[2] or "").strip() if turn else text


def without_end(answer: str) -> str:
    """An answer without the end-of-sequence token, and without the space around it."""
    return _END.sub("", answer).strip()


def sample_text(tokens: Sequence[str], supervised: Sequence[int], *, colour: bool) -> str:
    """Tokens with a bar between them; supervised ones in green, or else in square brackets."""
    parts = []
    for token, counts in zip(map(visible, tokens), supervised, strict=True):
        if not counts:
            parts.append(f"{token}|")
        else:
            parts.append(f"{_BOLD_GREEN}{token}{_PLAIN}|" if colour else f"[{token}]")
    return "".join(parts)
