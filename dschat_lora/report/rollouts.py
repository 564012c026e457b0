"""Rollouts of step 3, kept as one gzip member of JSON lines for each iteration."""

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.config.files import named
from dschat_lora.report.log import RunLog, jsonable
from dschat_lora.report.rollout_file import FILE, end_of_members


class RolloutLog:
    """Appends an iteration's responses to ``rollouts.jsonl.gz``; the first rank alone.

    A member is written at once, and a file of whole members is a gzip file: it can be read at any
    time, however the run ends. A failure of the disk is ``log``'s, and ends the run as its own.
    Part of the run's checkpoints: what was written after one is cut off when it is restored.
    """

    def __init__(self, directory: Path, log: RunLog, *, active: bool, source: Path | None) -> None:
        """Begin anew; ``source`` is the directory of an earlier run that a checkpoint is of."""
        self._path, self._log, self._active = directory / FILE, log, active
        self._source = self._path if source is None else source / FILE
        self._size = 0

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the responses of an iteration."""
        if not self._active or not rows or self._log.failure is not None:
            return
        text = "".join(json.dumps(jsonable(row), ensure_ascii=False) + "\n" for row in rows)
        member = gzip.compress(text.encode(), mtime=0)
        try:
            with self._path.open("r+b" if self._size else "wb", buffering=0) as file:
                file.seek(self._size)
                file.write(member)
                file.truncate()
        except OSError as error:
            self._log.failure = named(error, self._path)
            return
        self._size += len(member)

    def sync(self, _: int) -> None:
        """Sync the file to disk, before a checkpoint of a step refers to it."""
        if not self._active or not self._size or self._log.failure is not None:
            return
        try:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            self._log.failure = named(error, self._path)

    def state(self) -> dict[str, Any]:
        return {"bytes": self._size}

    def restore(self, state: dict[str, Any]) -> None:
        if not self._active:
            return
        wanted = int(state["bytes"])
        content = b""
        if self._source.is_file():
            with self._source.open("rb") as file:
                content = file.read(wanted)
        if len(content) < wanted:
            content = content[: end_of_members(content)]
            self._log.say(f"  note         {FILE} had lost responses: those that are left stay")
        self._size = len(content)
        if content or self._path.is_file():
            self._path.write_bytes(content)
