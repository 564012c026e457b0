"""Reading of ``rollouts.jsonl.gz``, gzip members of JSON lines, one for each iteration."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dschat_lora.config.files import parse_json, read_bytes

MOST_UNPACKED = 2**30  # bytes of all responses, which are in memory at once
_BLOCK = 2**16  # bytes that are unpacked at a time: to 64 MiB at most
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
    rows: list[dict[str, Any]] = []
    try:
        for text, _ in _members(read_bytes(path, most=MOST_UNPACKED), most=MOST_UNPACKED):
            for line in text.splitlines():
                rows.append(parse_json(line))
                if not _is_rollout(rows[-1]):
                    raise ValueError(f"line {len(rows)} is none")
    except ValueError as error:
        raise ValueError(f"{path} holds no responses of a run: {error}") from error
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
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def end_of_members(content: bytes) -> int:
    """Bytes of the whole members that a file begins with."""
    return max((end for _, end in _members(content)), default=0)


def _members(content: bytes, *, most: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Each whole gzip member's content, and where it ends.

    Raises:
        ValueError: if they hold more than ``most`` bytes.
    """
    end = unpacked = 0
    while end < len(content):
        member, parts = zlib.decompressobj(wbits=31), []
        while not member.eof and end < len(content):
            try:
                part = member.decompress(content[end : end + _BLOCK])
            except zlib.error:
                return
            parts.append(part)
            unpacked += len(part)
            if most is not None and unpacked > most:
                raise ValueError(f"unpacked it holds more than {most:,} bytes")
            end = min(end + _BLOCK, len(content)) - len(member.unused_data)
        if not member.eof:
            return
        yield b"".join(parts), end
