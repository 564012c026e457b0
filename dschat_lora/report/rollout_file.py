"""Responses of step 3 in ``rollouts.jsonl.gz``, as a run writes them."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.report.appended_file import AppendedFile
from dschat_lora.report.log import RunLog, jsonable

FILE = "rollouts.jsonl.gz"
_BLOCK = 2**16  # bytes that are unpacked at a time: to 64 MiB at most


def open_rollouts(
    directory: Path, log: RunLog, *, active: bool, source: Path | None
) -> AppendedFile:
    """The file of a run's responses, to be appended to by :func:`as_member`.

    Each iteration is a gzip member of JSON lines. It is written at once, and a file of whole
    members is a gzip file: it can be read at any time, however the run ends. ``source`` is the
    directory of an earlier run that a checkpoint is of.
    """
    return AppendedFile(
        directory / FILE,
        log,
        active=active,
        source=None if source is None else source / FILE,
        whole=lambda content: max((end for _, end in members(content)), default=0),
    )


def as_member(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The responses of an iteration as a gzip member of JSON lines; empty for none."""
    if not rows:
        return b""
    lines = (json.dumps(jsonable(row), ensure_ascii=False) + "\n" for row in rows)
    return gzip.compress("".join(lines).encode(), mtime=0)


def members(content: bytes, *, most: int | None = None) -> Iterator[tuple[bytes, int]]:
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
