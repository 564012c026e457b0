"""Time, compute, memory and checkpoints of stages, as HTML."""

from collections.abc import Sequence

from dschat_lora.report.markup import (
    amount,
    duration,
    html_table,
    meter,
    number,
    operations,
    safe,
    short,
)
from dschat_lora.report.story import StageStory

PHASES = ("generation", "scoring", "training")
OTHER = "evaluation and other"
THROUGHPUT = (
    ("step_seconds", "s a step", 1.0),
    ("tokens_per_second", "tokens/s", 1.0),
    ("samples_per_second", "samples/s", 1.0),
    ("tflops_per_device", "TFLOPs per device", 1.0),
    ("mfu", "MFU", 1.0),
)
# Parts of the estimate in run.json, and what they are.
_MEMORY = (
    ("weights", "weights"),
    ("training", "gradients, moments, adapters"),
    ("update", "activations and logits of an update"),
    ("cache", "keys and values while generating"),
    ("peak", "estimated peak"),
)


def time_section(stages: Sequence[StageStory]) -> str:
    """The report's section with tables of time, operations, throughput, memory, checkpoints."""
    rows = [row for story in stages for row in _phase_rows(story)]
    header = ["phase", "time", "share of the stage", "bar", "operations", "rate"]
    costs = html_table(header, rows, kind="numbers", markup=(3,))
    means = [(story, mean) for story in stages if (mean := story.part("throughput"))]
    rates = html_table(
        ["after warm-up", *(label for _, label, _ in THROUGHPUT)],
        [
            [_name(story), *(short(number(mean.get(k)) / scale) for k, _, scale in THROUGHPUT)]
            for story, mean in means
        ],
        kind="numbers",
    )
    return (
        f'<section id="time"><h2>Cost</h2><h3>Time and compute</h3>{costs}{rates}'
        "<p><small>Operations are counted from the modules that ran, without recomputation."
        f"</small></p>{_memory(stages)}{_checkpoints(stages)}</section>\n"
    )


def _name(story: StageStory) -> str:
    return f"{story.name}, {story.label}" if story.label else story.name


def _phase_rows(story: StageStory) -> list[list[str]]:
    phases = phases_of(story)
    total, rows = sum(seconds for seconds, _ in phases.values()), []
    for phase, (seconds, flops) in phases.items():
        name = f"{_name(story)}: {phase}"
        share = seconds / total if total > 0 else 0.0
        rate = operations(flops / seconds) + "/s" if flops and seconds else "-"
        bar = meter(share, name)
        rows.append([name, duration(seconds), f"{share:.1%}", bar, operations(flops), rate])
    return rows


def phases_of(story: StageStory) -> dict[str, tuple[float, float]]:
    """Seconds and floating-point operations of each phase of a stage, and of the rest.

    From run.json where it has phases, else summed over the train lines.
    """
    phases = {
        name: (amount(phase.get("seconds")), amount(phase.get("flops")))
        for name, phase in story.phases.items()
    }
    if not phases:
        for name in PHASES:
            seconds = sum(amount(line.get(f"{name}_seconds")) for line in story.train)
            phases |= {name: (seconds, 0.0)} if seconds else {}
    if not phases and story.train:
        world_size = amount(story.facts.get("world_size")) or 1.0
        steps = [
            [amount(line.get(k)) for k in ("step_seconds", "tflops_per_device")]
            for line in story.train
        ]
        flops = sum(seconds * rate for seconds, rate in steps) * 1e12 * world_size
        phases["training"] = (sum(seconds for seconds, _ in steps), flops)
    rest = story.seconds - sum(seconds for seconds, _ in phases.values())
    return phases | ({OTHER: (rest, 0.0)} if rest > 0 else {})


def measured_peak(story: StageStory) -> float:
    """Greatest memory of a process, in bytes; 0 if unknown."""
    lines = max((amount(line.get("peak_memory_bytes")) for line in story.train), default=0.0)
    return max(lines, amount(story.part("throughput").get("peak_memory_bytes")))


def _memory(stages: Sequence[StageStory]) -> str:
    """The parts of the estimate, its peak, and the peak that was measured."""
    used = [story for story in stages if measured_peak(story) or story.part("memory")]
    known = [
        (k, label) for k, label in _MEMORY if any(amount(s.part("memory").get(k)) for s in used)
    ]
    rows = []
    for story in used:
        peak, estimates = measured_peak(story), story.part("memory")
        estimate = amount(estimates.get("peak"))
        ratio = f"{estimate / peak:.0%}" if estimate and peak else "-"
        parts = (_gib(amount(estimates.get(key))) for key, _ in known)
        rows.append([_name(story), *parts, _gib(peak), *([ratio] if known else [])])
    header = ["GiB a process", *(label for _, label in known), "measured peak"]
    header += ["estimated / measured"] if known else []
    table = html_table(header, rows, kind="numbers")
    note = (
        "<p><small>On a CPU the measured peak holds the whole process, Python and its libraries "
        "included.</small></p>"
    )
    return f"<h3>Memory</h3>{table}{note}" if rows else ""


def _gib(size: float) -> str:
    return short(size / 2**30) if size else "-"


def _checkpoints(stages: Sequence[StageStory]) -> str:
    """How many checkpoints were saved, and which are on the disk."""
    items = []
    for story in stages:
        saved, kept = story.part("checkpoints"), story.checkpoints
        if not saved and not kept:
            continue
        words = [f"{value:,.0f} saved" for value in [amount(saved.get("saved"))] if value]
        seconds = amount(saved.get("seconds_in_training"))
        words += [f"training waited {duration(seconds)} for them"] if seconds else []
        limit = story.config.get("save_total_limit")
        names = ", ".join(f"{name} ({size / 2**20:,.1f} MiB)" for name, size in kept)
        words.append(f"on the disk: {names or 'none'}")
        words += [f"at most {limit} are kept"] if isinstance(limit, int) and limit else []
        resumed = story.facts.get("resumed")
        words += [f"resumed {len(resumed)} times"] if isinstance(resumed, list) else []
        items.append(f"<li><bdi>{safe(_name(story))}</bdi>: {safe('; '.join(words))}</li>")
    return f"<h3>Checkpoints</h3><ul>{''.join(items)}</ul>" if items else ""
