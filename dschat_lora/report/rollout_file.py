"""Reading of ``rollouts.jsonl.gz``, gzip members of JSON lines, one for each iteration."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "rollouts.jsonl.gz"


def read_rollouts(directory: Path) -> list[dict[str, Any]]:
    """Responses that a run kept, in the order of iterations; what is cut off is left out.

    Raises:
        ValueError: if there is no such file, or it is none of a run.
    """
    path = directory / FILE
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: give the output directory of a run of step 3 that wrote its "
            "responses (--log_rollouts)"
        )
    text = b"".join(part for part, _ in _members(path.read_bytes()))
    try:
        rows = [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} holds no responses of a run: {error}") from error
    if not all(map(_is_rollout, rows)):
        raise ValueError(f"{path} holds no responses of a run")
    return rows


def _is_rollout(row: object) -> bool:
    """Whether a row has what every response has; a number may be null, or "nan" and the like."""
    if not isinstance(row, dict):
        return False
    named = isinstance(row.get("rewards"), dict) and type(row.get("iteration")) is int
    texts = [row.get(name) for name in ("prompt", "response")]
    numbers = [row.get(name) for name in ("reward", "advantage", "kl", "length")]
    if not named or not all(isinstance(text, str) for text in texts):
        return False
    try:
        [float(n) for n in (*numbers, *row["rewards"].values()) if n is not None]
    except (TypeError, ValueError):
        return False
    return True


def end_of_members(content: bytes) -> int:
    """Bytes of the whole members that a file begins with."""
    return max((end for _, end in _members(content)), default=0)


def _members(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Each whole gzip member's content, and where it ends."""
    rest = content
    while rest:
        member = zlib.decompressobj(wbits=31)
        try:
            text = member.decompress(rest)
        except zlib.error:
            return
        if not member.eof:
            return
        rest = member.unused_data
        yield text, len(content) - len(rest)
