"""Curves of runs: the quantities that matter under names a person knows, with standard errors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dschat_lora.report.markup import number, short
from dschat_lora.report.story import StageStory

# Of all curves of a page together, and of one curve; what is thinned keeps its extremes.
MOST_POINTS, MOST_POINTS_OF_A_CURVE = 40_000, 1500
# A curve whose values differ by less than this share of their size is flat.
FLAT = 1e-4


@dataclass(frozen=True)
class Metric:
    """A quantity of train and eval lines."""

    title: str
    unit: str = ""
    train: str | None = None  # its field in train lines
    held_out: str | None = None
    share: bool = False  # shown in percent
    noise: float = 0.0  # values below this differ from 0 by rounding alone
    folded: bool = False  # looked at when something is wrong


# In this order, where there is data.
METRICS = (
    Metric("Loss", "nats per token or pair", "loss", "loss", noise=1e-6),
    Metric("Held-out perplexity", "", None, "perplexity"),
    Metric("Pairs ranked rightly", "%", "accuracy", "accuracy", share=True),
    Metric("Margin", "chosen minus rejected", "margin", "margin"),
    Metric("Reward", "mean per response", "reward", "reward"),
    Metric("Judge's score", "held-out, sampled", None, "judge"),
    Metric("Judge's score, greedy", "held-out", None, "greedy_judge"),
    Metric("Reward, greedy", "held-out", None, "greedy_reward"),
    Metric("KL to the reference", "nats per response", "kl", "kl"),
    Metric("KL coefficient", "", "kl_coef", folded=True),
    Metric("Entropy of the policy", "nats per token", "entropy"),
    Metric("Response length", "tokens", "response_length", "response_length"),
    Metric("Responses that end by themselves", "%", "eos_rate", "eos_rate", share=True),
    Metric("Responses cut off at the limit", "%", "truncated_fraction", share=True, folded=True),
    Metric("Variance of returns the critic explains", "1 is all", "explained_variance"),
    Metric("Value loss", "", "value_loss", folded=True),
    Metric("Policy loss", "", "policy_loss", noise=1e-6, folded=True),
    Metric("Ratios clipped", "% of tokens", "clip_fraction", share=True, folded=True),
    Metric("KL of an update", "nats per token", "approx_kl", noise=1e-7, folded=True),
    Metric("Gradient norm", "before clipping", "grad_norm", folded=True),
    Metric("Gradient norm of the critic", "before clipping", "critic_grad_norm", folded=True),
    Metric("Learning rate", "of the adapter", "lora_learning_rate", folded=True),
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
    def source(self) -> str:
        """Where the values are from."""
        return "held-out" if self.held_out else "training"


def curves_of(stories: Sequence[StageStory], metric: Metric) -> list[Curve]:
    """The metric's curves of runs of a stage; those without any value are left out."""
    found = []
    for run, story in enumerate(stories):
        for held_out, lines, name in (
            (False, story.train, metric.train),
            (True, story.evals, metric.held_out),
        ):
            curve = _curve(lines, name, metric, run=run, held_out=held_out)
            found += [curve] if curve.finite else []
    return found


def _curve(
    lines: Iterable[Mapping[str, Any]],
    name: str | None,
    metric: Metric,
    *,
    run: int,
    held_out: bool,
) -> Curve:
    """Step, value and standard error of the lines that have the field, in order of the steps."""
    scale = 100.0 if metric.share else 1.0
    points = [
        (number(line.get("step")), scale * number(line[name]), scale * standard_error(line, name))
        for line in lines
        if name is not None and line.get(name) is not None
    ]
    points = sorted((p for p in points if not math.isnan(p[0])), key=lambda point: point[0])
    steps, values, errors = zip(*points, strict=True) if points else ((), (), ())
    known = any(not math.isnan(error) for error in errors)
    return Curve(run, held_out, steps, values, errors if known else None)


def standard_error(line: Mapping[str, Any], name: str) -> float:
    """The standard error of a field of a line; NaN where it is not known.

    Of a share of independent samples, the binomial ``sqrt(p (1 - p) / n)``.
    """
    error = number(line.get(f"{name}_standard_error"))
    share, samples = number(line.get(name)), number(line.get("samples"))
    if math.isnan(error) and name == "accuracy" and 0 <= share <= 1 and samples > 0:
        return math.sqrt(share * (1 - share) / samples)
    return error


def further_metrics(stories: Sequence[StageStory]) -> list[Metric]:
    """Metrics for what evaluations of these runs hold beside the known fields."""
    known = {metric.held_out for metric in METRICS} | _NO_CURVES
    lines = (line for story in stories for line in story.evals)
    names = dict.fromkeys(name for line in lines for name in line if name not in known)
    return [
        Metric("Held-out " + name.replace("_", " "), held_out=name, folded=True)
        for name in names
        if not name.endswith("_standard_error")
    ]


def flat_words(metric: Metric, curves: Sequence[Curve], names: Sequence[str]) -> str | None:
    """What to say of a quantity instead of a chart of it; None if it has something to show.

    Curves are flat if each keeps its value but for rounding. A line between two values says no more
    than the two. ``names`` are those of the curves.
    """
    unit = f" {metric.unit}" if metric.unit else ""
    if all(abs(value) <= metric.noise for curve in curves for _, value in curve.finite):
        return f"{metric.title}: 0 but for rounding"
    if any(len(curve.finite) > 2 and not _is_flat(curve) for curve in curves):
        return None
    if len({short(value) for curve in curves for _, value in curve.finite}) == 1:
        return f"{metric.title}: {short(curves[0].finite[0][1])}{unit}"
    if len(curves) == 1:
        return f"{metric.title}: {_ends(curves[0])}{unit}"
    each = (f"{name} {_ends(curve)}" for name, curve in zip(names, curves, strict=True))
    return f"{metric.title}: {', '.join(each)}{unit}"


def _is_flat(curve: Curve) -> bool:
    values = [value for _, value in curve.finite]
    return max(values) - min(values) <= FLAT * max(map(abs, values))


def _ends(curve: Curve) -> str:
    first, last = (short(curve.finite[n][1]) for n in (0, -1))
    return first if _is_flat(curve) else f"{first} \u2192 {last}"


def describe(curve: Curve, name: str) -> str:
    """A curve in a sentence, for those who do not see it."""
    (first, start), (last, end) = curve.finite[0], curve.finite[-1]
    values = [value for _, value in curve.finite]
    words = f"{name}: {short(start)} at step {short(first)}"
    if len(values) > 1:
        words += f", {short(end)} at step {short(last)}, between {short(min(values))} and "
        words += short(max(values))
    return words + "."


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
