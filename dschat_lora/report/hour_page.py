"""The page of ``dschat-lora doctor --first_hour``: machine, checks, speed and memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from dschat_lora.report.html import page
from dschat_lora.report.markup import duration, html_table, number, safe, short, value_text

GIB = 2**30
_CHIPS = {"passed": "learned", "failed": "failed", "not run": "unclear"}
_ABOUT = (
    "Each check compares what the card computes with the CPU, or two of its own ways with each "
    "other, on the bundled model from the same seed: the largest relative difference found, and "
    "the largest that rounding explains. In fp32 that is 1e-4, for sums in another order. In 16 "
    "bits it is 8 roundings of the type, 2^-8 each in bf16 and 2^-11 in fp16: on a CPU these types "
    "are up to 2.1 roundings off from fp32. Rounding also lets RLHF draw other tokens; values are "
    "compared up to the first of them, and scores where responses are equal."
)
_SPEED = (
    "Models of published shapes with random weights, on the bundled data. The peak is that of "
    "torch's tensors; the plan is what dschat-lora plan says before the run, with the cache of "
    "decoding kept during updates, as a run keeps it where there is room."
)


def render_hour(found: Mapping[str, Any]) -> str:
    """The page of what was found, data of ``first_hour.json``."""
    machine = found["machine"]
    sections = {
        "machine": ("Machine", _machine(machine)),
        "checks": ("Checks", _checks(found["checks"])),
        "speed": ("Speed and memory", _measurements(found["measurements"])),
    }
    body = "".join(
        f'<section id="{key}"><h2>{title}</h2>{text}</section>\n'
        for key, (title, text) in sections.items()
    )
    items = "".join(
        f'<li><a href="#{key}">{title}</a></li>' for key, (title, _) in sections.items()
    )
    return page(f"First hour on {machine['card']}", items, body)


def _machine(machine: Mapping[str, Any]) -> str:
    sizes = ("memory_bytes", "host_memory_bytes")
    rows = [
        [name.removesuffix("_bytes").replace("_", " "), f"{value / GIB:.1f} GiB"]
        if name in sizes
        else [name.replace("_", " "), value_text(value)]
        for name, value in machine.items()
        if not isinstance(value, Mapping)
    ]
    rows += [[name, value_text(value)] for name, value in machine["versions"].items()]
    about = (
        "<p>This page and first_hour.json are for a bug report. They hold no name of a host or "
        "user, no directories and no environment variables.</p>"
    )
    return about + html_table(["", ""], rows)


def _checks(results: Sequence[Mapping[str, Any]]) -> str:
    cards = "".join(
        f'<article class="card"><h3><span class="chip {_CHIPS[result["state"]]}">'
        f"{result['state']}</span> {safe(result['name'])}</h3>"
        f"<ul>{_differences(result)}</ul><p>{safe(result['reason'])}</p>{_log(result)}"
        f"<small>{duration(result['seconds'])}</small></article>"
        for result in results
    )
    return f'<p>{safe(_ABOUT)}</p><div class="cards">{cards}</div>'


def _differences(result: Mapping[str, Any]) -> str:
    """A list's items, those that are too large in bold."""
    items = []
    for row in result.get("differences", ()):
        found, allowed = number(row["found"]), number(row["allowed"])
        words = f"{safe(row['quantity'])}: {found:.2g}, allowed {allowed:.2g}"
        items.append(f"<li>{words if row['holds'] else f'<b>{words}</b>'}</li>")
    return "".join(items)


def _measurements(results: Sequence[Mapping[str, Any]]) -> str:
    def cell(result: Mapping[str, Any], key: str, unit: float = 1.0) -> str:
        return short(number(result.get(key)) / unit)

    columns = {
        "tokens/s": "tokens_per_second",
        "decoded/s": "generation_tokens_per_second",
        "s/step": "step_seconds",
        "TFLOP/s": "tflops_per_device",
        "MFU": "mfu",
    }
    speed = [[r["name"], *(cell(r, key) for key in columns.values())] for r in results]
    memory = [
        [r["name"], cell(r, "peak_bytes", GIB), cell(r, "planned_bytes", GIB), _ratio(r)]
        for r in results
        if "peak_bytes" in r
    ]
    reasons = [[r["name"], r["state"], r["reason"]] for r in results if r["reason"]]
    tables = [
        html_table(["", *columns], speed, caption="Speed", kind="numbers"),
        html_table(
            ["", "peak, GiB", "plan, GiB", "peak/plan"], memory, caption="Memory", kind="numbers"
        ),
        html_table(["", "result", "reason"], reasons, caption="Without figures"),
    ]
    return f"<p>{safe(_SPEED)}</p>{''.join(tables)}{''.join(map(_log, results))}"


def _ratio(result: Mapping[str, Any]) -> str:
    return short(number(result["peak_bytes"]) / number(result["planned_bytes"]))


def _log(result: Mapping[str, Any]) -> str:
    """The last lines of what failed."""
    if not result["tail"]:
        return ""
    tail = f'<p class="tokens">{safe(result["tail"])}</p>'
    return f"<details><summary>Last lines of {safe(result['name'])}</summary>{tail}</details>"
