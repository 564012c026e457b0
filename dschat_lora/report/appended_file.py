"""Files that a run appends to, and cuts back where it goes on from a checkpoint."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dschat_lora.config.files import named
from dschat_lora.config.staging import open_in_place
from dschat_lora.report.log import RunLog


class AppendedFile:
    """A file of a run's directory that grows block by block; the first rank alone writes.

    A failure of the disk is ``log``'s, and ends the run as its own. Part of the run's checkpoints:
    what was appended after one is cut off when it is restored.
    """

    def __init__(
        self,
        path: Path,
        log: RunLog,
        *,
        active: bool,
        source: Path | None = None,
        head: str = "",
        whole: Callable[[bytes], int] = lambda content: content.rfind(b"\n") + 1,
    ) -> None:
        """Begin anew.

        ``source`` is the file of an earlier run that a checkpoint is of, and ``head`` what stands
        before the first block. ``whole`` gives the bytes of whole blocks in a content that was cut
        off; those of whole lines by default.
        """
        self._path, self._log, self._active = path, log, active
        self._source, self._head, self._whole = source or path, head, whole
        self._size = 0

    def append(self, block: bytes | str) -> None:
        """Append a block, of text as UTF-8; nothing on ranks other than the first."""
        if not self._active or not block or self._log.failure is not None:
            return
        block = block.encode() if isinstance(block, str) else block
        block = block if self._size else self._head.encode() + block
        try:
            with open_in_place(self._path, "r+b" if self._size else "wb", buffering=0) as file:
                file.seek(self._size)
                file.write(block)
                file.truncate()
        except OSError as error:
            self._log.failure = named(error, self._path)
            return
        self._size += len(block)

    def sync(self) -> None:
        """Sync the file to disk, before a checkpoint refers to it."""
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
            content = content[: self._whole(content)]
            lost = f"{self._path.name} had lost its end: what is left of it stays"
            self._log.say(f"  note         {lost}")
        self._size = len(content)
        if content or self._path.is_file():
            with open_in_place(self._path, "wb") as file:
                file.write(content)
