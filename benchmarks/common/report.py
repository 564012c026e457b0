"""Where a part's numbers go: a JSON file per device, and small tables on the terminal."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dschat_lora.report.log import jsonable
from dschat_lora.report.record import circumstances


class PartReport:
    """The entry of one part in a file of results, which is rewritten whole at each update.

    An entry says "running" until its part ends, so that one that was killed is told from one
    that finished, and keeps what was stored before.
    """

    def __init__(self, directory: Path, part: str, *, tiny: bool, file: str | None = None) -> None:
        """Open the entry.

        Args:
            directory: of the results.
            part: whose entry it is.
            tiny: whether shapes are tiny.
            file: the file is ``DEVICE-{file}.json``; by default ``DEVICE.json`` or, of tiny
                shapes, ``DEVICE-tiny.json``.
        """
        directory.mkdir(parents=True, exist_ok=True)
        suffix = file or ("tiny" if tiny else "")
        self._path = directory / f"{device_slug()}{'-' if suffix else ''}{suffix}.json"
        self._part = part
        self._start = time.monotonic()
        self._checks: dict[str, bool] = {}
        known = circumstances()
        self._entry: dict[str, Any] = {
            "status": "running",
            "tiny": tiny and file is None,
            "device": device_name(),
            "started": known["started"],
            "git_commit": known["git_commit"],
            "versions": known["versions"],
        }
        self.store({})

    def store(self, fields: Mapping[str, Any]) -> None:
        """Add or replace fields of the entry, on disk at once."""
        self._entry |= {**fields, "checks": self._checks}
        self._entry["seconds"] = round(time.monotonic() - self._start, 1)
        entries = _read(self._path) | {self._part: jsonable(self._entry)}
        staged = self._path.with_suffix(".json.partial")
        staged.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        staged.replace(self._path)

    def check(self, claim: str, holds: bool) -> None:
        """Record whether a claim holds; one that does not fails the part."""
        self._checks[claim] = bool(holds)
        print(f"{'ok  ' if holds else 'FAIL'}  {claim}")

    def finish(self) -> bool:
        """Close the entry; True if every claim held."""
        passed = all(self._checks.values())
        self.store({"status": "passed" if passed else "failed"})
        status, seconds = self._entry["status"], self._entry["seconds"]
        print(f"{self._part}: {status}, {seconds} s, {self._path.name}")
        return passed

    def fail(self, error: BaseException) -> None:
        """Close the entry with the error that ended the part, file paths shortened."""
        message = re.sub(r"(/[\w.+-]+)+/", "", str(error))
        self.store({"status": "failed", "error": f"{type(error).__name__}: {message[:500]}"})


def device_name() -> str:
    """The GPU's name as its driver gives it, or ``cpu``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def device_slug() -> str:
    """:func:`device_name` as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-")


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as their widest entry, the first flush left."""
    texts = [list(header), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    for row in texts:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):  # a spread
        return "{median:.3g} ({quartile_1:.3g} - {quartile_3:.3g})".format(**value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content
