"""report.html: curves, results and settings of runs in one file without script or network."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.report import charts
from dschat_lora.report.answers import answers_section, rollouts_section
from dschat_lora.report.charts import Curve, line_chart
from dschat_lora.report.costs import time_section
from dschat_lora.report.markup import amount, duration, html_table, number, safe, short, value_text
from dschat_lora.report.story import StageStory
from dschat_lora.report.style import STYLE
from dschat_lora.report.terminal import named

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


@dataclass(frozen=True)
class Chart:
    """Fields of train and eval lines that one chart shows."""

    title: str
    unit: str = ""
    train: str | None = None
    held_out: str | None = None
    share: bool = False


# In this order, where there is data.
CHARTS = (
    Chart("Loss", "nats", "loss", "loss"),
    Chart("Held-out perplexity", "", None, "perplexity"),
    Chart("Accuracy", "% of pairs ranked rightly", "accuracy", "accuracy", share=True),
    Chart("Margin", "chosen minus rejected", "margin", "margin"),
    Chart("Reward", "per response", "reward", "reward"),
    Chart("KL to the reference", "nats per response", "kl", "kl"),
    Chart("KL coefficient", "", "kl_coef"),
    Chart("Entropy", "nats per token", "entropy"),
    Chart("Response length", "tokens", "response_length", "response_length"),
    Chart("Ended by end-of-sequence", "% of responses", "eos_rate", "eos_rate", share=True),
    Chart("Cut off at the longest length", "% of responses", "truncated_fraction", share=True),
    Chart("Clipped ratios", "% of tokens", "clip_fraction", share=True),
    Chart("KL of an update", "nats per token", "approx_kl"),
    Chart("Policy loss", "", "policy_loss"),
    Chart("Value loss", "", "value_loss"),
    Chart("Variance explained by the values", "1 is all", "explained_variance"),
    Chart("Gradient norm", "before clipping", "grad_norm"),
)
TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dpo": "Direct preference optimization",
    "rlhf": "Reinforcement learning",
}
# Settings whose names hold one of these are shown before the others.
MATTERS = (
    *("model_name", "data_path", "seed", "dtype", "lora_dim", "lora_alpha", "target_modules"),
    *("learning_rate", "batch_size", "gradient_accumulation", "epochs", "max_steps", "seq_len"),
    *("scheduler", "warmup", "zero_stage", "kl_coef", "cliprange", "gamma", "lam", "temperature"),
    *("top_p", "top_k", "answer", "reward_loss", "packing"),
)
MOST_REMARKS = 50

Table = tuple[list[str], list[list[str]]]  # header and rows


def write_report(path: Path, html: str) -> None:
    """Write a file atomically.

    Raises:
        OSError: if the disk refuses; a file that was there stays as it was.
    """
    staged = path.with_name(path.name + ".partial")
    try:
        with staged.open("w", encoding="utf-8", newline="\n") as file:
            file.write(html)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        raise named(error, path) from error
    finally:
        staged.unlink(missing_ok=True)


def render_report(title: str, stages: Sequence[StageStory], tables: Mapping[str, Table]) -> str:
    """The report as an HTML document; everything in the arguments is data, never markup.

    ``stages`` are in the order they ran; ``tables`` are by caption.
    """
    links = [("summary", "Summary"), *((f"stage-{i}", s.name) for i, s in enumerate(stages))]
    links.append(("time", "Time and compute"))
    items = "".join(f'<li><a href="#{key}">{safe(name)}</a></li>' for key, name in links)
    sections = [
        _summary(stages, tables),
        *(_stage(story, key=f"stage-{i}") for i, story in enumerate(stages)),
        time_section(stages),
    ]
    return page(title, items, "".join(sections))


def page(title: str, items: str, body: str) -> str:
    """An HTML document; ``items`` of the navigation and ``body`` are markup, the title is text."""
    sections = f'<nav aria-label="Sections"><ul>{items}</ul></nav>' if items else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{safe(title)}</title><style>{charts.STYLE}{STYLE}</style></head>\n"
        f'<body><header><h1 dir="auto">{safe(title)}</h1>{sections}</header>\n'
        f"<main>{body}</main></body></html>\n"
    )


def _summary(stages: Sequence[StageStory], tables: Mapping[str, Table]) -> str:
    header = ["stage", "status", "started from", "trained parameters", "steps", "time", "held-out"]
    rows = [
        [
            story.name,
            _status(story),
            _base(story),
            _trained(story),
            short(max((amount(line.get("step")) for line in story.train), default=0.0)),
            duration(story.seconds),
            _change(story),
        ]
        for story in stages
    ]
    results = "".join(
        html_table(head, body, caption=caption, kind="numbers")
        for caption, (head, body) in tables.items()
    )
    what = html_table(header, rows, caption="What was trained")
    return (
        f'<section id="summary"><h2>Summary</h2>{what}<div class="tables">{results}</div>'
        "</section>\n"
    )


def _status(story: StageStory) -> str:
    status = str(story.facts.get("status", "unknown"))
    return status if status == "finished" else f"\u26a0\ufe0e {status}"


def _base(story: StageStory) -> str:
    bases = [v for k, v in story.config.items() if k.endswith("model_name_or_path")]
    return "\n".join(value_text(base or "the bundled tiny model") for base in bases) or "-"


def _trained(story: StageStory) -> str:
    parameters = story.part("parameters")
    trained, total = (number(parameters.get(name)) for name in ("trainable", "total"))
    if math.isnan(trained) or not total > 0:
        return "-"
    return f"{trained:,.0f} of {total:,.0f} ({trained / total:.1%})"


def _change(story: StageStory) -> str:
    """The run's own results, those before and after in one line."""
    lines, results = [], story.part("results")
    words = {k: short(v) if isinstance(v, float) else value_text(v) for k, v in results.items()}
    for name, value in words.items():
        quantity = name.removesuffix(" before")
        after = words.get(f"{quantity} after")
        if name != quantity and after is not None:
            lines.append(f"{quantity} {value} \u2192 {after}")
        elif f"{name.removesuffix(' after')} before" not in words:
            lines.append(f"{name} {value}")
    return "\n".join(lines) or "-"


def _stage(story: StageStory, *, key: str) -> str:
    return (
        f'<section id="{key}"><h2 dir="auto">{safe(TITLES.get(story.name, story.name))}</h2>'
        f"{_remarks(story)}{_charts(story, key)}{answers_section(story)}"
        f"{rollouts_section(story)}{_settings(story)}</section>\n"
    )


def _remarks(story: StageStory) -> str:
    """Warnings and other events, grouped by text, and notes on unreadable files."""
    steps: dict[str, list[str]] = {}
    for line in story.events:
        text = ": ".join(value_text(line[name]) for name in ("event", "message") if name in line)
        steps.setdefault(text, []).append(value_text(line.get("step", "?")))
    items = [f'<li dir="auto">{safe(note)}</li>' for note in story.notes]
    for text, at in steps.items():
        where = ", ".join(at[:5]) + (f", ... ({len(at):,} times)" if len(at) > 5 else "")
        items.append(f"<li><bdi>{safe(text)}</bdi> <small>step {safe(where)}</small></li>")
    more = len(items) - MOST_REMARKS
    if more > 0:
        items[MOST_REMARKS:] = [f"<li>and {more:,} more in metrics.jsonl</li>"]
    if not items:
        return ""
    return f'<div class="warnings"><h3>Warnings and events</h3><ul>{"".join(items)}</ul></div>'


def _charts(story: StageStory, key: str) -> str:
    marks = [number(line.get("step")) for line in story.events if line.get("event") == "warning"]
    drawn = ""
    for index, chart in enumerate((*CHARTS, *_further(story))):
        scale, top = (100.0, 100.0) if chart.share else (1.0, math.inf)
        curves = [
            Curve("training", _points(story.train, chart.train, scale)),
            Curve("held-out", _points(story.evals, chart.held_out, scale), color=1, dashed=True),
        ]
        where = f"{key}-chart-{index}"
        drawn += line_chart(chart.title, curves, key=where, unit=chart.unit, top=top, marks=marks)
    return f'<div class="charts">{drawn}</div>' if drawn else "<p>No curves: no metrics.</p>"


def _further(story: StageStory) -> list[Chart]:
    """Charts of the other evaluation metrics of a stage with a reward."""
    if not any("reward" in line for line in story.train):
        return []
    known = {chart.held_out for chart in CHARTS} | {"step", "time", "samples", "tokens", "epoch"}
    names = dict.fromkeys(name for line in story.evals for name in line if name not in known)
    return [Chart("Held-out " + name.replace("_", " "), held_out=name) for name in names]


def _points(
    lines: Sequence[Mapping[str, Any]], name: str | None, scale: float
) -> list[tuple[float, float]]:
    """Step and value of the lines that have the field, in order of the steps."""
    points = [
        (number(line.get("step")), scale * number(line[name]))
        for line in lines
        if name is not None and line.get(name) is not None
    ]
    return sorted((p for p in points if not math.isnan(p[0])), key=lambda point: point[0])


def _settings(story: StageStory) -> str:
    """Command and versions, the options that matter, then the others; folded."""
    facts = story.facts
    command = facts.get("command")
    origin = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        **{k: facts.get(k) for k in ("started", "git_commit", "platform", "world_size")},
        "dtype used": facts.get("dtype"),
        "versions": ", ".join(f"{k} {value_text(v)}" for k, v in story.part("versions").items()),
        "data fingerprint": story.part("data").get("fingerprint"),
    }
    matters = {k: v for k, v in story.config.items() if any(m in k for m in MATTERS)}
    others = {k: v for k, v in story.config.items() if k not in matters}
    shown = {k: v for k, v in (origin | matters).items() if v not in (None, "")}
    if not shown and not others:
        return ""

    def table_of(values: Mapping[str, Any]) -> str:
        return html_table(
            ["setting", "value"], [[k, value_text(v)] for k, v in values.items()], kind="settings"
        )

    rest = f"<details><summary>All other options</summary>{table_of(others)}</details>"
    return (
        f"<details><summary>Settings and versions</summary>{table_of(shown)}"
        f"{rest if others else ''}</details>"
    )
