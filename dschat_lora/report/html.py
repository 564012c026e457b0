"""report.html: what runs did, in one file that needs no other, no script and no network."""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.report import charts
from dschat_lora.report.charts import Curve, line_chart, number, safe, short, stacked_bars
from dschat_lora.report.story import StageStory, _amount
from dschat_lora.report.terminal import named

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f23; --muted: #57606a;
  --panel: #f5f7f9; --warning: #b42318; --link: #0060a0; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e7eaed; --muted: #a9b1b9; --panel: #1e2328;
    --warning: #ff8f80; --link: #7cc4f4; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { margin-top: 2.5rem; }
h3 { margin: 1.5rem 0 .5rem; }
h1, h2 { border-bottom: 1px solid var(--grid); padding-bottom: .3rem; }
a { color: var(--link); } small, .words, .when { color: var(--muted); font-weight: normal; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; padding: 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--grid); text-align: left;
  vertical-align: top; font-weight: normal; white-space: pre-wrap; }
thead th { overflow-wrap: break-word; } td, tbody th { min-width: 6rem; }
.numbers td { white-space: nowrap; min-width: 0; } .numbers th + td { padding-left: .4rem; }
.settings { table-layout: fixed; width: 100%; }
.settings th { overflow-wrap: anywhere; width: 40%; max-width: 20rem; }
.tables { display: flex; flex-wrap: wrap; gap: 0 4rem; } .tables > * { max-width: 100%; }
thead th { color: var(--muted); font-size: .9rem; }
table.numbers :is(td, thead th + th) { text-align: right; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr));
  gap: 1.2rem 2rem; margin: 1.2rem 0; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; }
.words { font-size: .8rem; margin: .2rem 0 0; } .legend { font-size: .85rem; margin: .2rem 0; }
.warnings { border-left: 4px solid var(--warning); padding: .4rem 1rem; background: var(--panel); }
.warnings h3 { margin-top: .3rem; }
.warnings li::marker { content: "\\26A0\\FE0E  "; color: var(--warning); }
.sample { background: var(--panel); border-radius: 6px; padding: .8rem 1rem; margin: .8rem 0; }
.answers { display: grid; gap: .5rem 1.5rem; margin-top: .6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 16rem), 1fr)); }
.when { font-size: .85rem; } .text { white-space: pre-wrap; unicode-bidi: plaintext; }
.answers .text { border-left: 3px solid var(--grid); padding-left: .7rem; }
summary { cursor: pointer; color: var(--link); margin: .6rem 0; }
"""


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
PHASES = ("generation", "scoring", "training")
OTHER = "evaluation and other"
THROUGHPUT = (
    ("step_seconds", "s a step", 1.0),
    ("tokens_per_second", "tokens/s", 1.0),
    ("samples_per_second", "samples/s", 1.0),
    ("tflops_per_device", "TFLOPs per device", 1.0),
    ("mfu", "MFU", 1.0),
    ("peak_memory_bytes", "peak memory, GiB", 2.0**30),
)
MOST_SAMPLES = 20
MOST_REMARKS = 50


def write_report(path: Path, html: str) -> None:
    """Put ``html`` under ``path``, whole or not at all.

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


def render_report(
    title: str,
    stages: Sequence[StageStory],
    tables: Mapping[str, tuple[list[str], list[list[str]]]],
) -> str:
    """The report as an HTML document; everything in the arguments is data, never markup.

    Args:
        title: of the document.
        stages: in the order they ran.
        tables: header and rows of each result table, by its caption.
    """
    links = [("summary", "Summary"), *((f"stage-{i}", s.name) for i, s in enumerate(stages))]
    links.append(("time", "Time and compute"))
    items = "".join(f'<li><a href="#{key}">{safe(name)}</a></li>' for key, name in links)
    sections = [
        _summary(stages, tables),
        *(_stage(story, key=f"stage-{i}") for i, story in enumerate(stages)),
        _time(stages),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{safe(title)}</title><style>{charts.STYLE}{STYLE}</style></head>\n"
        f'<body><header><h1 dir="auto">{safe(title)}</h1><nav aria-label="Sections">'
        f"<ul>{items}</ul></nav></header>\n<main>{''.join(sections)}</main></body></html>\n"
    )


def _summary(
    stages: Sequence[StageStory], tables: Mapping[str, tuple[list[str], list[list[str]]]]
) -> str:
    header = ["stage", "status", "started from", "trained parameters", "steps", "time", "held-out"]
    rows = [
        [
            story.name,
            _status(story),
            _base(story),
            _trained(story),
            short(max((_amount(line.get("step")) for line in story.train), default=0.0)),
            duration(story.seconds),
            _change(story),
        ]
        for story in stages
    ]
    results = "".join(
        _table(head, body, caption=caption, kind="numbers")
        for caption, (head, body) in tables.items()
    )
    what = _table(header, rows, caption="What was trained")
    return (
        f'<section id="summary"><h2>Summary</h2>{what}<div class="tables">{results}</div>'
        "</section>\n"
    )


def _status(story: StageStory) -> str:
    status = str(story.facts.get("status", "unknown"))
    return status if status == "finished" else f"\u26a0\ufe0e {status}"


def _base(story: StageStory) -> str:
    bases = [v for k, v in story.config.items() if k.endswith("model_name_or_path")]
    return "\n".join(_value(base or "the bundled tiny model") for base in bases) or "-"


def _trained(story: StageStory) -> str:
    parameters = story.part("parameters")
    trained, total = (number(parameters.get(name)) for name in ("trainable", "total"))
    if math.isnan(trained) or not total > 0:
        return "-"
    return f"{trained:,.0f} of {total:,.0f} ({trained / total:.1%})"


def _change(story: StageStory) -> str:
    """The run's own results, those before and after in one line."""
    lines, results = [], story.part("results")
    words = {k: short(v) if isinstance(v, float) else _value(v) for k, v in results.items()}
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
        f"{_remarks(story)}{_charts(story, key)}{_samples(story)}{_settings(story)}</section>\n"
    )


def _remarks(story: StageStory) -> str:
    """Warnings and other events, those of one text together, and what could not be read."""
    steps: dict[str, list[str]] = {}
    for line in story.events:
        text = ": ".join(_value(line[name]) for name in ("event", "message") if name in line)
        steps.setdefault(text, []).append(_value(line.get("step", "?")))
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
    figures = []
    for index, chart in enumerate((*CHARTS, *_further(story))):
        scale, top = (100.0, 100.0) if chart.share else (1.0, math.inf)
        curves = [
            Curve("training", _points(story.train, chart.train, scale)),
            Curve("held-out", _points(story.evals, chart.held_out, scale), color=1, dashed=True),
        ]
        figures.append(
            line_chart(
                *(chart.title, curves),
                key=f"{key}-chart-{index}",
                unit=chart.unit,
                top=top,
                marks=marks,
            )
        )
    drawn = "".join(figures)
    return f'<div class="charts">{drawn}</div>' if drawn else "<p>No curves: no metrics.</p>"


def _further(story: StageStory) -> list[Chart]:
    """Charts of what evaluations of a stage with a reward measure besides the usual."""
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


def _samples(story: StageStory) -> str:
    """Answers to each prompt, side by side."""
    prompts: dict[str, list[tuple[str, str]]] = {}
    for each in story.answers:
        when, prompt, answer = (str(each.get(k, "")) for k in ("when", "prompt", "answer"))
        prompts.setdefault(prompt, []).append((when, answer))
    if not prompts:
        return ""
    parts = ["<h3>Answers to held-out prompts</h3>"]
    for prompt, answers in list(prompts.items())[:MOST_SAMPLES]:
        columns = "".join(
            f'<div><div class="when">{safe(when)}</div>'
            f'<div class="text" dir="auto">{safe(answer.strip() or "(empty)")}</div></div>'
            for when, answer in answers
        )
        parts.append(
            f'<div class="sample"><div class="text" dir="auto">{safe(prompt.strip())}</div>'
            f'<div class="answers">{columns}</div></div>'
        )
    if len(prompts) > MOST_SAMPLES:
        parts.append(f"<p>and {len(prompts) - MOST_SAMPLES:,} more in run.json</p>")
    return "".join(parts)


def _settings(story: StageStory) -> str:
    """Where the run comes from, the options that matter, then the others; folded."""
    facts = story.facts
    command = facts.get("command")
    origin = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        **{k: facts.get(k) for k in ("started", "git_commit", "platform", "world_size")},
        "dtype used": facts.get("dtype"),
        "versions": ", ".join(f"{k} {_value(v)}" for k, v in story.part("versions").items()),
        "data fingerprint": story.part("data").get("fingerprint"),
    }
    matters = {k: v for k, v in story.config.items() if any(m in k for m in MATTERS)}
    others = {k: v for k, v in story.config.items() if k not in matters}
    shown = {k: v for k, v in (origin | matters).items() if v not in (None, "")}
    if not shown and not others:
        return ""

    def table_of(values: Mapping[str, Any]) -> str:
        return _table(
            ["setting", "value"], [[k, _value(v)] for k, v in values.items()], kind="settings"
        )

    rest = f"<details><summary>All other options</summary>{table_of(others)}</details>"
    return (
        f"<details><summary>Settings and versions</summary>{table_of(shown)}"
        f"{rest if others else ''}</details>"
    )


def _time(stages: Sequence[StageStory]) -> str:
    spent = [(story.name, phases_of(story)) for story in stages]
    names = list(dict.fromkeys([*PHASES, OTHER, *(name for _, each in spent for name in each)]))
    bars = [
        stacked_bars(
            title,
            [(name, {p: cost[i] for p, cost in phases.items()}) for name, phases in spent],
            key=key,
            names=names,
            format_value=format_value,
        )
        for i, title, key, format_value in (
            (0, "Time", "time-seconds", duration),
            (1, "Floating-point operations", "time-flops", operations),
        )
    ]
    rows = []
    for name, phases in spent:
        total = sum(seconds for seconds, _ in phases.values())
        for phase, (seconds, flops) in phases.items():
            share = f"{seconds / total:.1%}" if total > 0 else "-"
            rate = operations(flops / seconds) + "/s" if flops and seconds else "-"
            rows.append([f"{name}: {phase}", duration(seconds), share, operations(flops), rate])
    header = ["phase", "time", "share of the stage", "operations", "rate"]
    costs = _table(header, rows, kind="numbers")
    rates = _table(
        ["after warm-up", *(label for _, label, _ in THROUGHPUT)],
        [
            [s.name, *(short(number(s.throughput.get(k)) / scale) for k, _, scale in THROUGHPUT)]
            for s in stages
            if s.throughput
        ],
        kind="numbers",
    )
    return (
        f'<section id="time"><h2>Time and compute</h2><div class="charts">{"".join(bars)}</div>'
        f"{costs}{rates}<p><small>Operations are counted from the modules that ran, without "
        "recomputation.</small></p></section>\n"
    )


def phases_of(story: StageStory) -> dict[str, tuple[float, float]]:
    """Seconds and floating-point operations of each phase of a stage, and of what is between.

    From run.json where it has phases, else summed over the train lines.
    """
    phases = {
        name: (_amount(phase.get("seconds")), _amount(phase.get("flops")))
        for name, phase in story.phases.items()
    }
    if not phases:
        for name in PHASES:
            seconds = sum(_amount(line.get(f"{name}_seconds")) for line in story.train)
            phases |= {name: (seconds, 0.0)} if seconds else {}
    if not phases and story.train:
        world_size = _amount(story.facts.get("world_size")) or 1.0
        steps = [
            [_amount(line.get(k)) for k in ("step_seconds", "tflops_per_device")]
            for line in story.train
        ]
        flops = sum(seconds * rate for seconds, rate in steps) * 1e12 * world_size
        phases["training"] = (sum(seconds for seconds, _ in steps), flops)
    rest = story.seconds - sum(seconds for seconds, _ in phases.values())
    return phases | ({OTHER: (rest, 0.0)} if rest > 0 else {})


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{minutes // 60} h {minutes % 60} min"


def operations(flops: float) -> str:
    """Floating-point operations in words."""
    if flops <= 0:
        return "-"
    for size, name in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= size:
            return f"{flops / size:,.3g} {name}"
    return f"{flops / 1e6:.3g} MFLOP"


def _value(value: Any) -> str:
    """A value of run.json or metrics.jsonl in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    return "none" if value is None else str(value)


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str = "",
    kind: str = "",
) -> str:
    """A table whose first column names the rows; empty without rows."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{safe(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{safe(row[0])}</th>'
        f"{''.join(f'<td>{safe(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
        if row
    )
    title = f"<caption>{safe(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{kind}">{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
