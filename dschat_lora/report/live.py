"""report.html of a run: written again now and then while it goes on, and at its end."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dschat_lora.report.html import render_report, write_report
from dschat_lora.report.log import RunLog
from dschat_lora.report.story import read_story
from dschat_lora.report.terminal import note

FILE = "report.html"
LEAST_SECONDS = 30.0  # between two pages
PAUSE = 50  # times as long as a page took, which costs 2 % of the time at most


class LiveReport:
    """Keeps the page of a run; on the first rank alone.

    A failure is said once and ends the page, not the training.
    """

    def __init__(
        self, directory: Path, log: RunLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A page in ``directory`` of what ``log`` holds."""
        self._directory, self._log, self._clock = directory, log, clock
        self._due: float | None = clock() + LEAST_SECONDS

    def __call__(self, event: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the page if the last one is old enough: a callback of the log."""
        now = self._clock()
        if self._due is None or now < self._due:
            return
        self.write(self._log.text())
        took = self._clock() - now
        if self._due is not None:
            self._due = now + max(LEAST_SECONDS, PAUSE * took)

    def write(self, metrics: str | None = None, *, quiet: bool = False) -> None:
        """Write the page, of ``metrics``, the content of metrics.jsonl, or else of the file.

        ``quiet`` after a failure that is told already, and that may be the disk's.
        """
        if self._due is None:
            return
        try:
            story = read_story(self._directory, metrics=metrics)
            html = render_report(self._directory.resolve().name, [story], {})
            write_report(self._directory / FILE, html)
        except Exception as error:  # noqa: BLE001 - whatever a page lacks, training goes on
            self._due = None
            if not quiet:
                note(f"{self._directory / FILE} cannot be written: {error!r}")
