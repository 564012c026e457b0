"""report.html: verdict, curves, samples, cost and settings of runs in one file without network.

Scripts and styles stand in the file and run by their hashes alone. What comes from data is escaped
text, or JSON that no parser of HTML takes for anything else.
"""

import base64
import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from dschat_lora.config.files import naming
from dschat_lora.report.answers import (
    answers_section,
    rollout_data,
    rollouts_section,
    tokens_section,
)
from dschat_lora.report.costs import time_section
from dschat_lora.report.curves import Chart, chart_data, charts_of, charts_section
from dschat_lora.report.data_view import data_section
from dschat_lora.report.markup import duration, html_table, safe, short, value_text
from dschat_lora.report.settings import differences, settings_section
from dschat_lora.report.story import StageStory
from dschat_lora.report.verdict import (
    TITLES,
    WORDS,
    changes_of,
    cost,
    doubts,
    outcome_of,
    what_was_trained,
)

_ASSETS = Path(__file__).parent / "page"
RELOAD_SECONDS = 20  # between loads of the page of a run that goes on

Table = tuple[list[str], list[list[str]]]  # header and rows


def write_report(path: Path, html: str) -> None:
    """Write a file atomically.

    Raises:
        OSError: if the disk refuses; a file that was there stays as it was.
    """
    staged = path.with_name(path.name + ".partial")
    try:
        with naming(path), staged.open("w", encoding="utf-8", newline="\n") as file:
            file.write(html)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def render_report(title: str, stages: Sequence[StageStory], tables: Mapping[str, Table]) -> str:
    """The report as an HTML document; everything in the arguments is data, never markup.

    ``stages`` are in the order they ran, runs of one stage in a section of their own; ``tables``
    are by caption.
    """
    counts = Counter(story.name for story in stages)
    stages = [story if counts[story.name] > 1 else replace(story, label="") for story in stages]
    groups: dict[str, list[StageStory]] = {}
    for story in stages:
        groups.setdefault(story.name, []).append(story)
    answers = answers_section(stages)
    links = [("summary", "Verdict"), *((f"stage-{i}", name) for i, name in enumerate(groups))]
    links += [("answers", "Answers")] if answers else []
    links.append(("time", "Cost"))
    items = "".join(f'<li><a href="#{key}">{safe(name)}</a></li>' for key, name in links)
    sections, charts = [], list[Chart]()
    for index, stories in enumerate(groups.values()):
        drawn, flat = charts_of(stories, index)
        curves = charts_section(drawn, flat, first=len(charts))
        sections.append(_stage(stories, curves, index))
        charts += drawn
    body = "".join([_summary(stages, tables), *sections, answers, time_section(stages)])
    data = {
        "charts": chart_data(charts),
        "rollouts": [rollout_data(stories) for stories in groups.values()],
        "reload": RELOAD_SECONDS if any(story.is_running for story in stages) else 0,
    }
    return page(title, items, body, data=data)


def page(title: str, items: str, body: str, *, data: Mapping[str, object] | None = None) -> str:
    """An HTML document; ``items`` of the navigation and ``body`` are markup, the title is text.

    With ``data``, JSON, it has the script that draws them.
    """
    style = "".join(_asset(name) for name in ("uPlot.min.css", "report.css"))
    # With its licence, which every copy of the library carries.
    library = f"/*\n{_asset('uPlot.LICENSE')}\n*/\n{_asset('uPlot.iife.min.js')}"
    scripts = [library, _asset("report.js")] if data else []
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts)) or chr(39) + 'none' + chr(39)}",
        f"style-src {_hash(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    sections = f'<nav aria-label="Sections"><ul>{items}</ul></nav>' if items else ""
    run = "".join(f"<script>{script}</script>" for script in scripts)
    embedded = f'<script type="application/json" id="data">{_json(data)}</script>' if data else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{safe(title)}</title><style>{style}</style></head>\n"
        f'<body><header><h1 dir="auto">{safe(title)}</h1>{sections}</header>\n'
        f"<main>{body}</main>\n{embedded}{run}</body></html>\n"
    )


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    """The source of a policy that allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(value: object) -> str:
    """JSON without a character that could end or begin an element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(each): f"\\u{ord(each):04x}" for each in "<>&"})


def _summary(stages: Sequence[StageStory], tables: Mapping[str, Table]) -> str:
    cards = "".join(map(_card, stages))
    results = "".join(
        html_table(head, body, caption=caption, kind="numbers")
        for caption, (head, body) in tables.items()
    )
    reload = (
        f'<p class="live">The run goes on, and this page loads itself again every {RELOAD_SECONDS} '
        'seconds where scripts run. <label><input type="checkbox" id="pause"> Pause</label></p>'
        if any(story.is_running for story in stages)
        else ""
    )
    return (
        f'<section id="summary"><h2>Verdict</h2>{reload}<div class="cards">{cards}</div>'
        f'<div class="tables">{results}</div></section>\n'
    )


def _card(story: StageStory) -> str:
    """The verdict on a run."""
    outcome = outcome_of(story)
    name = TITLES.get(story.name, story.name)
    label = f" <small><bdi>{safe(story.label)}</bdi></small>" if story.label else ""
    changes = "".join(f"<li>{safe(change.words)}</li>" for change in changes_of(story))
    wrong = "".join(
        f"<li><bdi>{safe(text)}</bdi>{f' <small>{safe(where)}</small>' if where else ''}</li>"
        for text, where in doubts(story)
    )
    signs = (
        f'<div class="warnings"><h4>What looks wrong</h4><ul>{wrong}</ul></div>'
        if wrong
        else "<p>Nothing looks wrong.</p>"
    )
    return (
        f'<article class="card"><h3><span class="chip {outcome}">{WORDS[outcome]}</span> '
        f"<bdi>{safe(name)}</bdi>{label}</h3><p>{safe(what_was_trained(story))}</p>"
        f"<ul>{changes or _results(story)}</ul><p>{safe(cost(story))}</p>{signs}</article>"
    )


def _results(story: StageStory) -> str:
    """The results in run.json, those before and after in one line, of a stage without curves."""
    items, results = [], story.part("results")
    words = {k: short(v) if isinstance(v, float) else value_text(v) for k, v in results.items()}
    for name, value in words.items():
        quantity = name.removesuffix(" before")
        after = words.get(f"{quantity} after")
        if name != quantity and after is not None:
            items.append(f"{quantity}: {value} \u2192 {after}")
        elif f"{name.removesuffix(' after')} before" not in words:
            items.append(f"{name}: {value}")
    return "".join(f"<li>{safe(each)}</li>" for each in items)


def _stage(stories: Sequence[StageStory], curves: str, index: int) -> str:
    """Curves, responses, data and settings of the runs of one stage."""
    name = stories[0].name
    parts = [curves, differences(stories), rollouts_section(stories, index)]
    for story in stories:
        several = len(stories) > 1
        head = f"<h3><bdi>{safe(story.label)}</bdi></h3>" if several else ""
        parts.append(f"{head}{tokens_section(story)}{data_section(story)}{settings_section(story)}")
    seconds = f" <small>{duration(stories[0].seconds)}</small>" if len(stories) == 1 else ""
    return (
        f'<section id="stage-{index}"><h2 dir="auto">{safe(TITLES.get(name, name))}{seconds}</h2>'
        f"{''.join(parts)}</section>\n"
    )
