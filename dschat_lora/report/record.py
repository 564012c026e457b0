"""run.json: what was run, with what, on what, and how it ended."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dschat_lora import __version__
from dschat_lora.config.staging import write_whole
from dschat_lora.report.directory import read_object
from dschat_lora.report.log import jsonable

_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "tokenizers", "safetensors", "numpy")


class RunRecord:
    """``run.json`` of a run, rewritten whole at each update; rank 0 alone writes."""

    def __init__(self, output_dir: Path, *, active: bool, earlier: bool = False) -> None:
        """Prepare to write, on the ``active`` rank.

        ``earlier`` goes on with the content of an earlier run, which stays untouched until
        :meth:`release`.
        """
        self._path = output_dir / "run.json"
        self._active = active
        self._content = read_object(self._path) if earlier and active else {}
        #: the first error of the disk
        self.failure: OSError | None = None
        #: whether the file belongs to this run
        self.is_open = not earlier

    def release(self) -> None:
        """Let the file show what was held back."""
        self.is_open = True
        self.update({})

    def update(self, fields: Mapping[str, Any]) -> None:
        """Add or replace top-level fields; if the disk refuses, the file stays as it was."""
        self._content |= fields
        if self._active and self.is_open:
            text = json.dumps(jsonable(self._content), indent=2)
            # Every list of numbers and strings, which hold no line ends, on one line.
            item = r'"(?:\\.|[^"\\])*"|[^"\[\]{}]'
            lists = re.compile(rf"\[\n\s+((?:{item})*?)\n\s+\]")
            text = lists.sub(lambda items: "[" + re.sub(r"\n\s+", " ", items[1]) + "]", text)
            try:
                write_whole(self._path, f"{text}\n")
            except OSError as error:
                self.failure = self.failure or error

    def check(self) -> None:
        """Raise the OSError with which the disk refused an update, if it did."""
        if self.failure is not None:
            raise self.failure

    def append(self, name: str, item: object) -> None:
        """Add ``item`` to the list under ``name``."""
        self.update({name: [*self._content.get(name, []), item]})


def package_versions() -> dict[str, str | None]:
    """Version of Python, of this package and of those it stands on; None where not installed."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "dschat_lora": __version__,
    }
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def circumstances() -> dict[str, Any]:
    """Command, package versions, git commit of the checkout (None outside one) and platform."""
    commit = None
    with suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
        commit = result.stdout.strip() or None
    return {
        "command": [Path(sys.executable).name, *sys.argv],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "git_commit": commit,
        "platform": platform.platform(),
    }
