"""Texts with their references, and how the metrics cut them into tokens."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

Texts = Sequence[str]
References = Sequence[Sequence[str]]
Tokens = tuple[str, ...]

# Abbreviations; words with the marks within them; contracted endings; whatever else stands alone.
_TREEBANK = re.compile(
    r"\.\.\.|--"
    r"|(?:[a-z]\.)+|(?:dr|jr|mr|mrs|ms|sr|st)\."
    r"|\w+?(?=n['\u2019]t\b)|n['\u2019]t\b|['\u2019](?:s|re|ve|ll|m|d)\b"
    r"|\w+(?:(?:['\u2019](?!(?:s|re|ve|ll|m|d|t)\b)|[-.,:/&_])\w+)*"
    r"|\S"
)
# Punctuation that the E2E challenge leaves out of the tokens; brackets are kept.
_PUNCTUATION = {
    *('"', "'", "`", "''", "``", ".", "?", "!", ",", ":", ";", "-", "--", "..."),
    *("\u2013", "\u2014", "\u2018", "\u2019", "\u201c", "\u201d"),
}


@dataclass(frozen=True)
class Score:
    """A metric over a whole test set."""

    value: float  # in the metric's own scale
    signature: str  # which variant it is, and of which version


def treebank_tokens(text: str) -> Tokens:
    """Tokens of the Penn Treebank's kind in lower case, without punctuation.

    Close to Stanford's PTBTokenizer as the E2E challenge uses it, which needs Java.
    """
    return tuple(t for t in _TREEBANK.findall(text.lower()) if t not in _PUNCTUATION)


def streams(references: References) -> list[list[str | None]]:
    """Lists of one reference for each text; where a text has fewer, None."""
    return [list(stream) for stream in zip_longest(*references)]
