"""Curves of runs: quantities under names a person knows, with standard errors, and their charts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dschat_lora.addons.report.markup import number
from dschat_lora.addons.report.run_data import RunData
from dschat_lora.report.texts import short

# Of all curves of a page together, and of one curve; what is thinned keeps its extremes.
MOST_POINTS, MOST_POINTS_OF_A_CURVE = 40_000, 1500
# A curve whose values differ by less than this share of their size is flat.
FLAT = 1e-4


@dataclass(frozen=True)
class Metric:
    """A quantity of train and eval lines."""

    title: str
    unit: str  # the label of the vertical axis
    train: str | None = None  # its field in train lines
    held_out: str | None = None
    share: bool = False  # shown in percent
    noise: float = 0.0  # values below this differ from 0 by rounding alone
    folded: bool = False  # looked at when something is wrong


# In this order, where there is data.
METRICS = (
    Metric("Loss", "nats", "loss", "loss", noise=1e-6),
    Metric("Held-out perplexity", "perplexity", None, "perplexity"),
    Metric("Accuracy", "% of pairs", "accuracy", "accuracy", share=True),
    Metric("Margin", "chosen minus rejected", "margin", "margin"),
    Metric("Reward", "mean of responses", "reward", "reward"),
    Metric("Judge, sampled", "score", None, "judge"),
    Metric("Judge, greedy", "score", None, "greedy_judge"),
    Metric("Reward, greedy", "mean of responses", None, "greedy_reward"),
    Metric("KL to the reference", "nats per response", "kl", "kl"),
    Metric("KL coefficient", "coefficient", "kl_coef", folded=True),
    Metric("Entropy of the policy", "nats per token", "entropy"),
    Metric("Response length", "tokens", "response_length", "response_length"),
    Metric("Responses that end with EOS", "% of responses", "eos_rate", "eos_rate", share=True),
    Metric(
        "Responses cut off at the length limit",
        "% of responses",
        "truncated_fraction",
        share=True,
        folded=True,
    ),
    Metric("Explained variance of the critic", "share", "explained_variance"),
    Metric("Value loss", "loss", "value_loss", folded=True),
    Metric("Policy loss", "loss", "policy_loss", noise=1e-6, folded=True),
    Metric("Clip fraction", "% of tokens", "clip_fraction", share=True, folded=True),
    Metric("Approximate KL of an update", "nats per token", "approx_kl", noise=1e-7, folded=True),
    Metric("Gradient norm before clipping", "norm", "grad_norm", folded=True),
    Metric("Gradient norm of the critic before clipping", "norm", "critic_grad_norm", folded=True),
    Metric("Learning rate of the adapter", "rate", "lora_learning_rate", folded=True),
)
# Fields of lines that are no curves of their own.
_NO_CURVES = {
    *("kind", "step", "time", "samples", "tokens", "epoch", "iteration", "reliability"),
    *("greedy_kl", "greedy_response_length", "greedy_eos_rate", "supervised_tokens"),
    *("chosen_length", "rejected_length"),
}


@dataclass(frozen=True)
class Curve:
    """One line of a chart; NaN is a gap."""

    run: int  # index of the run among those of its chart
    name: str  # training or held-out, and the run if there are several
    held_out: bool
    steps: Sequence[float]
    values: Sequence[float]
    errors: Sequence[float] | None = None  # standard errors, NaN where there is none

    @property
    def finite(self) -> list[tuple[float, float]]:
        """Steps and values that are numbers."""
        pairs = zip(self.steps, self.values, strict=True)
        return [(step, value) for step, value in pairs if not math.isnan(value)]

    @property
    def is_flat(self) -> bool:
        """Whether it keeps its value but for rounding."""
        values = [value for _, value in self.finite]
        return max(values) - min(values) <= FLAT * max(map(abs, values))

    @property
    def ends(self) -> str:
        """The first and the last value; of a flat curve the first one."""
        first, last = (short(self.finite[n][1]) for n in (0, -1))
        return first if self.is_flat else f"{first} \u2192 {last}"


@dataclass(frozen=True)
class Chart:
    """A quantity of runs of one stage."""

    metric: Metric
    curves: Sequence[Curve]
    runs: Sequence[str]  # their names
    marks: Sequence[float]  # steps of warnings
    group: int  # of the stage
    x_label: str = "optimizer step"

    @property
    def words(self) -> str:
        """The curves in sentences, for those who do not see them."""
        sentences = []
        for curve in self.curves:
            (first, start), (last, end) = curve.finite[0], curve.finite[-1]
            values = [value for _, value in curve.finite]
            words = f"{curve.name}: {short(start)} at step {short(first)}"
            if len(values) > 1:
                words += f", {short(end)} at step {short(last)}, between {short(min(values))} and "
                words += short(max(values))
            sentences.append(words + ".")
        return " ".join(sentences)

    @property
    def gaps(self) -> str:
        """The number of values that each curve lacks; empty if none."""
        missing = [(curve, len(curve.values) - len(curve.finite)) for curve in self.curves]
        return "; ".join(
            f"{curve.name}: {count:,} of {len(curve.values):,} values not finite"
            for curve, count in missing
            if count
        )


def charts_of(runs: Sequence[RunData], group: int) -> tuple[list[Chart], list[str]]:
    """Charts of runs of one stage, and sentences on what stays the same."""
    charts, flat = [], []
    warnings = (e for run in runs for e in run.events if e.get("event") == "warning")
    marks = sorted({s for e in warnings if not math.isnan(s := number(e.get("step")))})
    x_label = steps_label([line for run in runs for line in run.train])
    of_policy = any("policy_loss" in line for run in runs for line in run.train[:1])
    for metric in (*METRICS, *_further_metrics(runs)):
        if metric.train == "loss" and of_policy:
            continue  # the same under another name
        if not (curves := [*_curves(runs, metric)]):
            continue
        if words := _flat_words(metric, curves):
            flat.append(words)
        else:
            labels = [run.label for run in runs]
            charts.append(Chart(metric, curves, labels, marks[:200], group, x_label))
    return sorted(charts, key=lambda chart: chart.metric.folded), flat


def _curves(runs: Sequence[RunData], metric: Metric) -> Iterator[Curve]:
    """The metric's curves of runs of a stage, in order of steps; those without any value not."""
    scale = 100.0 if metric.share else 1.0
    for index, run in enumerate(runs):
        for lines, name in ((run.train, metric.train), (run.evals, metric.held_out)):
            if name is None:
                continue
            points = [
                (
                    number(line.get("step")),
                    scale * number(line[name]),
                    scale * standard_error(line, name),
                )
                for line in lines
                if line.get(name) is not None
            ]
            points = sorted((p for p in points if not math.isnan(p[0])), key=lambda p: p[0])
            steps, values, errors = zip(*points, strict=True) if points else ((), (), ())
            known = errors if not all(map(math.isnan, errors)) else None
            source = "held-out" if lines is run.evals else "training"
            source = source if len(runs) < 2 else f"{run.label}, {source}"
            curve = Curve(index, source, lines is run.evals, steps, values, known)
            if curve.finite:
                yield curve


def steps_label(train: Sequence[Mapping[str, Any]]) -> str:
    """What the number of a step counts, and in step 3 how many an iteration makes."""
    ratios = {
        number(line.get("step")) / count
        for line in train
        if (count := number(line.get("iteration"))) > 0
    }
    (ratio,) = ratios if len(ratios) == 1 else (math.nan,)
    return "optimizer step" + ("" if math.isnan(ratio) else f" ({short(ratio)} per iteration)")


def standard_error(line: Mapping[str, Any], name: str) -> float:
    """The standard error of a field of a line; NaN where it is not known.

    Of a share of independent samples, the binomial ``sqrt(p (1 - p) / n)``.
    """
    error = number(line.get(f"{name}_standard_error"))
    share, samples = number(line.get(name)), number(line.get("samples"))
    if math.isnan(error) and name == "accuracy" and 0 <= share <= 1 and samples > 0:
        return math.sqrt(share * (1 - share) / samples)
    return error


def _further_metrics(runs: Sequence[RunData]) -> list[Metric]:
    """Metrics for what evaluations of these runs hold beside the known fields."""
    known = {metric.held_out for metric in METRICS} | _NO_CURVES
    names = dict.fromkeys(name for run in runs for line in run.evals for name in line)
    return [
        Metric("Held-out " + name.replace("_", " "), "value", held_out=name, folded=True)
        for name in names
        if name not in known and not name.endswith("_standard_error")
    ]


def _flat_words(metric: Metric, curves: Sequence[Curve]) -> str | None:
    """What to say of a quantity instead of a chart of it; None if it has something to show.

    A line between two values says no more than the two.
    """
    unit = " %" if metric.share else ""
    if all(abs(value) <= metric.noise for curve in curves for _, value in curve.finite):
        return f"{metric.title}: 0 up to rounding errors"
    if any(len(curve.finite) > 2 and not curve.is_flat for curve in curves):
        return None
    if len({short(value) for curve in curves for _, value in curve.finite}) == 1:
        return f"{metric.title}: {short(curves[0].finite[0][1])}{unit}"
    if len(curves) == 1:
        return f"{metric.title}: {curves[0].ends}{unit}"
    return f"{metric.title}: {', '.join(f'{c.name} {c.ends}' for c in curves)}{unit}"


def chart_data(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """The charts as JSON for the script, thinned where they hold very many points."""
    count = sum(len(chart.curves) for chart in charts)
    most = max(50, min(MOST_POINTS_OF_A_CURVE, MOST_POINTS // max(1, count)))

    def rounded(value: float) -> float | None:
        if math.isnan(value):
            return None
        return int(value) if value == int(value) else float(f"{value:.5g}")

    def points(curve: Curve) -> dict[str, list[float | None]]:
        columns = {"x": curve.steps, "y": curve.values}
        columns |= {} if curve.errors is None else {"e": curve.errors}
        kept = thin(curve.values, most)
        return {key: [rounded(values[i]) for i in kept] for key, values in columns.items()}

    return [
        {
            "group": chart.group,
            "percent": chart.metric.share,
            "labels": [chart.x_label, chart.metric.unit],
            "marks": list(chart.marks),
            "curves": [
                {"name": c.name, "run": c.run, "held": c.held_out, **points(c)}
                for c in chart.curves
            ],
        }
        for chart in charts
    ]


def thin(values: Sequence[float], most: int) -> list[int]:
    """At most ``most`` of the indices; least, greatest, first, last values and gaps (NaN) stay.

    Each of equal stretches keeps its least and its greatest value and, if it has one, a gap.
    """
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(1, (most - 2) // 3)
    edges = [round(i * len(values) / stretches) for i in range(stretches + 1)]
    kept = {0, len(values) - 1}
    for first, last in pairwise(edges):
        here = range(first, last)
        kept.update(next(([i] for i in here if math.isnan(values[i])), []))
        if finite := [i for i in here if not math.isnan(values[i])]:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)
