"""Samples token by token, with the mark of what is supervised: as text, in colour, as HTML."""

from collections.abc import Sequence

from dschat_lora.report.markup import safe

LEAST_LOSSES = (0.1, 0.7, 2.0, 4.0)  # nats, from which a token has a darker shade
_BOLD_GREEN, _PLAIN = "\x1b[1;32m", "\x1b[0m"


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


def loss_html(
    tokens: Sequence[str], supervised: Sequence[int], losses: Sequence[float | None]
) -> str:
    """Tokens as HTML: the darker the greater their loss; those that are trained on are marked."""
    parts = []
    for token, counts, loss in zip(map(visible, tokens), supervised, losses, strict=True):
        tag, level = "mark" if counts else "span", _level(loss)
        shade = f' class="down{level}"' if level else ""
        title = "" if loss is None else f' title="loss {loss:.3g}" tabindex="-1"'
        parts.append(f"<{tag}{shade}{title}>{safe(token)}</{tag}>")
    return f'<p class="tokens losses">{"&#8203;".join(parts)}</p>'


def _level(loss: float | None) -> int:
    """Which of four shades a loss in nats has; 0 below a probability of about 0.9."""
    return 0 if loss is None else sum(not loss < least for least in LEAST_LOSSES)  # nan: most


def visible(token: str) -> str:
    """A token with its line ends and other control characters written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def histogram(above: dict[str, int], total: int, *, width: int = 40) -> list[str]:
    """Lines of a histogram of lengths, from the number of rows above each limit."""
    limits = [*above]
    counts = [total, *above.values()]
    lines = []
    for number, limit in enumerate(limits):
        inside = counts[number] - counts[number + 1]
        bar = "#" * round(width * inside / max(1, total))
        lines.append(f"  up to {int(limit):>7,} tokens {inside:>9,} rows  {bar}".rstrip())
    if counts[-1]:
        lines.append(f"  more                 {counts[-1]:>9,} rows")
    return lines
