"""Time and compute: seconds, floating-point operations and throughput of stages, as HTML."""

from collections.abc import Sequence

from dschat_lora.report.charts import stacked_bars
from dschat_lora.report.markup import amount, duration, html_table, number, operations, short
from dschat_lora.report.story import StageStory

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


def time_section(stages: Sequence[StageStory]) -> str:
    """The report's section with bars and tables of time, operations and throughput."""
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
    costs = html_table(header, rows, kind="numbers")
    means = [(story.name, mean) for story in stages if (mean := story.part("throughput"))]
    rates = html_table(
        ["after warm-up", *(label for _, label, _ in THROUGHPUT)],
        [
            [name, *(short(number(mean.get(k)) / scale) for k, _, scale in THROUGHPUT)]
            for name, mean in means
        ],
        kind="numbers",
    )
    return (
        f'<section id="time"><h2>Time and compute</h2><div class="charts">{"".join(bars)}</div>'
        f"{costs}{rates}<p><small>Operations are counted from the modules that ran, without "
        "recomputation.</small></p></section>\n"
    )


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
