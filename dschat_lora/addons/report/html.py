"""Pages in one HTML file without network, such as the report of runs.

The templates are in ``page/``. Scripts and styles stand in the file and run by their hashes alone.
What comes from data is escaped text, or JSON that no parser of HTML takes for anything else.
"""

import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.report import sections, verdict
from dschat_lora.addons.report.curves import Chart, chart_data, charts_of
from dschat_lora.addons.report.markup import without_controls
from dschat_lora.addons.report.rollouts import summary_text
from dschat_lora.addons.report.run_data import RunData, read_run
from dschat_lora.config.plurals import counted
from dschat_lora.config.staging import write_whole
from dschat_lora.report.log import RunLog
from dschat_lora.report.terminal import note
from dschat_lora.report.texts import duration, visible

if TYPE_CHECKING:
    from jinja2 import Environment

ASSETS = Path(__file__).parent / "page"
FILE = "report.html"
RELOAD_SECONDS = 20  # between loads of the page of a run that goes on
LEAST_SECONDS = 30.0  # between two pages
PAUSE = 50  # times as long as a page took, which costs 2 % of the time at most

Table = tuple[list[str], list[list[str]]]  # header and rows


class LiveReport:
    """Writes report.html of a run now and then while it goes on, and at its end.

    An :class:`~dschat_lora.runtime.caller.Observer`, on rank 0 alone. A failure is said once and
    ends the page, not the training.
    """

    def __init__(
        self, directory: Path, log: RunLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A page in ``directory`` of what ``log`` holds."""
        self._path, self._log, self._clock = directory / FILE, log, clock
        self.words = f"report: {self._path} (open it in a browser)"
        self._due: float | None = clock() + LEAST_SECONDS

    def __call__(self, event: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the page if the last one is old enough: a callback of the log."""
        now = self._clock()
        if self._due is None or now < self._due:
            return
        self._write(self._log.text())
        took = self._clock() - now
        if self._due is not None:
            self._due = now + max(LEAST_SECONDS, PAUSE * took)

    def end(self, *, quiet: bool = False) -> None:
        """Write the page of the files; ``quiet`` after a failure, which may be the disk's."""
        self._write(None, quiet=quiet)

    def _write(self, metrics: str | None, *, quiet: bool = False) -> None:
        """Write the page, of ``metrics``, the content of metrics.jsonl, or else of the file."""
        if self._due is None:
            return
        try:
            home = self._path.parent
            run = read_run(home, metrics=metrics)
            write_whole(self._path, render_report(home.resolve().name, [run], {}))
        except Exception as error:  # noqa: BLE001 - whatever a page lacks, training goes on
            self._due = None
            if not quiet:
                note(f"{self._path} cannot be written: {error!r}")


def render_report(title: str, runs: Sequence[RunData], tables: Mapping[str, Table]) -> str:
    """The report as an HTML document; everything in the arguments is data, never markup.

    ``runs`` are in the order they ran, those of one stage in a section of their own; ``tables``
    are by caption.
    """
    counts = Counter(run.name for run in runs)
    runs = [run if counts[run.name] > 1 else replace(run, label="") for run in runs]
    by_stage: dict[str, list[RunData]] = {}
    for run in runs:
        by_stage.setdefault(run.name, []).append(run)
    answers = sections.answers(runs)
    links = {"summary": "Results"} | ({"answers": "Answers"} if answers else {})
    links |= {f"stage-{i}": verdict.title_of(name) for i, name in enumerate(by_stage)}
    stages, charts = [], list[Chart]()
    for index, (name, own) in enumerate(by_stage.items()):
        drawn, flat = charts_of(own, index)
        stage = {"index": index, "name": name, "runs": own, "charts": drawn, "flat": flat}
        stages.append(stage | {"first": len(charts)})
        charts += drawn
    reload = RELOAD_SECONDS if any(run.status == "running" for run in runs) else 0
    return render(
        "report.html",
        title,
        links=links | {"time": "Time and memory"},
        data={
            "charts": chart_data(charts),
            "rollouts": [sections.rollout_data(own) for own in by_stage.values()],
            "reload": reload,
        },
        runs=runs,
        stages=stages,
        tables=tables,
        answers=answers,
        reload=reload,
    )


def page(title: str, body: str) -> str:
    """An HTML document whose ``body`` is markup; the title is text."""
    return render("base.html", title, body=body)


def render(
    template: str,
    title: str,
    *,
    links: Mapping[str, str] | None = None,
    data: Mapping[str, object] | None = None,
    **values: object,
) -> str:
    """A page of a template in ``page/``; ``links`` are to its sections.

    With ``data``, which are JSON, it has the script that draws them.
    """
    style = _asset("uPlot.min.css") + _asset("report.css")
    # With its licence, which every copy of the library carries.
    library = f"/*\n{_asset('uPlot.LICENSE')}\n*/\n{_asset('uPlot.iife.min.js')}"
    scripts = [library, _asset("report.js")] if data else []
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts)) or chr(39) + 'none' + chr(39)}",
        f"style-src {_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    # Without a character that could end or begin an element.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False) if data else ""
    text = text.translate({ord(each): f"\\u{ord(each):04x}" for each in "<>&"})
    values |= {"title": title, "links": links, "policy": "; ".join(rules), "style": style}
    return environment().get_template(template).render(scripts=scripts, data=text, **values)


@cache
def environment() -> "Environment":
    """Of the templates in ``page/``.

    All values are escaped, but those that a template calls safe.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else without_controls(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for function in (counted, duration, summary_text, visible):
        environment.globals[function.__name__] = function
    environment.globals |= {"sections": sections, "verdict": verdict}
    return environment


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    """The source of a policy that allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
