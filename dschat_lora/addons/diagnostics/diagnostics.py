"""Warnings of known failures, from the metrics of iterations and evaluations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from dschat_lora.config.plurals import counted
from dschat_lora.engine.distributed import sum_over_processes
from dschat_lora.rl.options.engines import EngineFacts
from dschat_lora.rl.watch.metrics import SAMPLER_TOLERANCE

WINDOW = 5  # iterations that a diagnosis is made over
PATIENCE = 20  # iterations before the critic is expected to explain anything
# Old and new log-probabilities come from one code path and may differ by rounding alone.
RATIO_TOLERANCE = {"fp32": 1e-6, "bf16": 0.05, "fp16": 0.01}
# Divergence of sampler and policy in nats per token, and share of tokens without weight, that are
# worth a warning.
MISMATCH_TOLERANCE, MASKED_TOLERANCE = 0.01, 0.2
# Share of responses that are cut off of which most cannot be right.
MOST_CUT_OFF = 0.7
# Mean length of responses by that of the first window, up or down, that is a drift.
LENGTH_DRIFT = 2
# Standard errors of a difference that are a fall, where nothing else is compared.
FALL = 2.0
# Failures that --guard is about; the others are warned of in any case.
GUARDED = frozenset({"entropy", "eos", "length", "kl_budget", "judge", "held_out"})
_METRICS = (
    *("kl", "kl_standard_error", "eos_rate", "entropy", "explained_variance", "reward_std"),
    *("failed_episodes", "response_length", "ratio_error", "score_clip_fraction"),
    *("sampler_error", "rollout_kl", "rollout_ratio_max", "rollout_version_lag"),
    *("importance_weight", "importance_masked", "reward", "dropped", "samples", "undrawn"),
    *("equal_prompts", "prompts"),
)


@dataclass
class Diagnostics:
    """Warns of failures after an iteration or evaluation, of each once until it has passed.

    ``failed`` says whether one that is guarded was warned of since the latest iteration began.
    """

    name = "watch"

    dtype: str  # compute type, which bounds rounding errors
    # Responses come from the very policy that is compared with the reference: no top-p, no top-k,
    # no greedy choice.
    samples_tokens: bool
    engine: EngineFacts
    samplers_logprobs: bool = False  # old log-probabilities are the decode loop's
    learns_from_rewards: bool = True
    guard: str = "warn"  # or "stop"; "off": those of GUARDED are not looked for
    kl_budget: float = 0.0  # nats per response; 0: any
    failed: bool = False
    first: list[dict[str, float]] = field(default_factory=list)
    latest: list[dict[str, float]] = field(default_factory=list)
    iterations: int = 0
    evaluations: list[dict[str, float]] = field(default_factory=list)
    active: list[str] = field(default_factory=list)  # failures that were warned of

    def after_log(self, metrics: Mapping[str, Any]) -> list[str]:
        """Warnings after an iteration with these metrics."""
        row = _numbers(metrics, _METRICS)
        self.iterations, self.failed = self.iterations + 1, False
        if len(self.first) < WINDOW:
            self.first.append(row)
        self.latest = [*self.latest, row][-WINDOW:]
        failures = {
            "ratio": None if self.samplers_logprobs else self._ratio(row),
            "sampler": self._sampler(row),
            "mismatch": self._mismatch(row),
            "masked": self._masked(row),
            "dropped": self._dropped(row),
            "kl_budget": self._kl_budget(),
            "no_signal": self._no_signal(row),
        }
        if len(self.latest) == WINDOW:
            eos = self._eos()
            failures |= {
                "kl": self._negative_kl(),
                "eos": eos,
                "cut": None if eos else self._cut_off(),
                # Where rewards are not learnt from, both become the reference's.
                "length": self._length() if self.learns_from_rewards else None,
                "entropy": self._entropy() if self.learns_from_rewards else None,
                "critic": self._critic(),
                "equal": self._equal_rewards(),
                "clip": self._clipped(),
            }
        return self._new(failures)

    def after_evaluation(self, metrics: Mapping[str, Any]) -> list[str]:
        """Warnings after an evaluation with these metrics."""
        ends = ("", "_standard_error", "_change_standard_error")
        row = _numbers(metrics, [f"{name}{end}" for name in ("reward", "judge") for end in ends])
        if (trained := self._mean(self.latest, "reward")) is not None:
            row["train_reward"] = trained
        self.evaluations.append(row)
        return self._new({"judge": self._judged(), "held_out": self._held_out()})

    def stopped_by(self) -> str:
        """``--guard stop`` where a failure ends the run; called on every rank."""
        if self.guard != "stop":
            return ""
        (failed,) = sum_over_processes([float(self.failed)])
        return "--guard stop" if failed else ""

    def state(self) -> dict[str, Any]:
        names = ("first", "latest", "iterations", "evaluations")
        return {name: getattr(self, name) for name in names} | {"said": self.active}

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("first", "latest", "evaluations"):
            # What is not finite went through JSON as text.
            rows = [{key: float(value) for key, value in row.items()} for row in state[name]]
            setattr(self, name, rows)
        self.iterations, self.active = state["iterations"], list(state["said"])

    def _new(self, failures: dict[str, str | None]) -> list[str]:
        """The messages of ``failures`` by name that were not active; None: it is none."""
        if self.guard == "off":
            failures = {name: text for name, text in failures.items() if name not in GUARDED}
        new = [text for name, text in failures.items() if text and name not in self.active]
        self.failed |= any(text in new for name, text in failures.items() if name in GUARDED)
        present = [name for name, text in failures.items() if text]
        self.active = [*(name for name in self.active if name not in failures), *present]
        return new

    def _mean(self, rows: list[dict[str, float]], name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return sum(values) / len(values) if values else None

    def _ratio(self, row: dict[str, float]) -> str | None:
        limit = RATIO_TOLERANCE[self.dtype]
        if row.get("ratio_error", 0.0) <= limit:
            return None
        return (
            "the policy's log-probabilities before its first step differ from those at sampling "
            f"by a ratio of {row['ratio_error']:.2g}, more than rounding in {self.dtype} explains "
            f"({limit:g}): the two passes do not see the same input"
        )

    def _mismatch(self, row: dict[str, float]) -> str | None:
        kl = row.get("rollout_kl", 0.0)
        if kl <= MISMATCH_TOLERANCE or not self.samples_tokens:
            return None
        words = "weights become noisy"
        if "importance_weight" not in row:
            words = (
                "the gradient is biased; --rollout_correction tis corrects it with importance "
                "weights"
            )
        remedy = (
            "use the same dtypes for weights, adapter and KV cache on both sides to reduce this"
        )
        if row.get("rollout_version_lag"):
            remedy = "lower --rollouts_ahead or the learning rate to reduce this"
        if self.engine.same_model:
            words += f"; {remedy}"
        return (
            f"responses are sampled from a policy that is {kl:.2g} nats per token from the "
            f"trained one, with a ratio of up to {row['rollout_ratio_max']:.2g}: {words}"
        )

    def _masked(self, row: dict[str, float]) -> str | None:
        share = row.get("importance_masked", 0.0)
        if share <= MASKED_TOLERANCE:
            return None
        return (
            f"--rollout_correction mis leaves out {share:.0%} of the tokens: raise "
            "--rollout_is_threshold, lower --rollout_is_threshold_lower, or use tis"
        )

    def _sampler(self, row: dict[str, float]) -> str | None:
        limit = SAMPLER_TOLERANCE[self.dtype]
        if row.get("sampler_error", 0.0) <= limit or not self.engine.exact:
            return None
        return (
            f"the decode loop's log-probabilities are {row['sampler_error']:.2g} nats per token "
            f"away from those used in training, more than rounding in {self.dtype} ({limit:g}): "
            "responses are sampled from a different policy than the one that is trained"
        )

    def _negative_kl(self) -> str | None:
        kl = self._mean(self.latest, "kl")
        error = self._mean(self.latest, "kl_standard_error")
        if kl is None or error is None or not self.samples_tokens:
            return None
        if kl >= -max(4 * error / WINDOW**0.5, 1e-4):
            return None
        return (
            f"the divergence from the reference is negative ({kl:.3g} nats per response), which "
            "is impossible for samples of the policy: log-probabilities and samples come from "
            "different policies"
        )

    def _eos(self) -> str | None:
        before, after = (self._mean(rows, "eos_rate") for rows in (self.first, self.latest))
        if before is None or after is None or before < 0.2 or after > 0.5 * before:
            return None
        return (
            f"only {after:.0%} of the responses end with a stop token, {before:.0%} did at the "
            "start: the policy is unlearning to stop; raise --kl_coef or --missing_eos_penalty, "
            "or --max_answer_seq_len if answers need more tokens"
        )

    def _cut_off(self) -> str | None:
        ended = self._mean(self.latest, "eos_rate")
        if ended is None or ended > 1 - MOST_CUT_OFF:
            return None
        return (
            f"{1 - ended:.0%} of the last responses are cut off: raise --max_answer_seq_len, or "
            "--missing_eos_penalty if answers should be short"
        )

    def _length(self) -> str | None:
        rows = self.first, self.latest
        before, after = (self._mean(each, "response_length") for each in rows)
        if not before or not after or 1 / LENGTH_DRIFT < after / before < LENGTH_DRIFT:
            return None
        return (
            f"responses have become {'longer' if after > before else 'shorter'} by a factor of "
            f"{max(after / before, before / after):.2g}, {after:.3g} tokens from {before:.3g}: "
            "unless the task requires this, the reward favours length; raise --kl_coef or change "
            "the reward"
        )

    def _kl_budget(self) -> str | None:
        kl = self._mean(self.latest, "kl")
        if not self.kl_budget or kl is None or kl <= self.kl_budget:
            return None
        return (
            f"the divergence from the reference, {kl:.3g} nats per response, is above --kl_budget "
            f"{self.kl_budget:g}: raise --kl_coef, lower the learning rate, or stop earlier"
        )

    def _entropy(self) -> str | None:
        before, after = (self._mean(rows, "entropy") for rows in (self.first, self.latest))
        if before is None or after is None or before <= 0 or not after <= 0.1 * before:
            return None
        return (
            f"the entropy has collapsed to {after:.3g} nats per token from {before:.3g}: the "
            "policy hardly explores any more; lower the learning rate, raise --kl_coef or "
            "--entropy_coef"
        )

    def _critic(self) -> str | None:
        explained = self._mean(self.latest, "explained_variance")
        if explained is None or self.iterations < PATIENCE or explained > 0.05:
            return None
        return (
            f"the critic explains {explained:.0%} of the returns after {self.iterations} "
            "iterations, so advantages are noise: raise the critic's learning rate or "
            "--cliprange_value (in units of reward), or use --algorithm rloo"
        )

    def _no_signal(self, row: dict[str, float]) -> str | None:
        """Of the first such iteration alone; it stays among those that were warned of."""
        if "no_signal" in self.active:
            return "known"
        prompts = row.get("prompts", 0.0)
        if not prompts or row["equal_prompts"] < prompts or not self.learns_from_rewards:
            return None
        return (
            f"iteration {self.iterations} teaches nothing: the responses to each of its "
            f"{counted(round(prompts), 'prompt')} got equal rewards"
        )

    def _equal_rewards(self) -> str | None:
        spread = self._mean(self.latest, "reward_std")
        if spread is None or spread > 0 or not self.learns_from_rewards:
            return None
        value, before = (self._mean(rows, "reward") for rows in (self.latest, self.first))
        if value is None or before is None:
            value = before = math.nan
        if value > before:
            why = f"it rose from {before:.3g}: the task is solved"
        elif value < before:
            why = f"it fell from {before:.3g}: no response succeeds any more"
        else:
            why = (
                "it has been so from the start: unless this is the best score, use easier prompts, "
                "or a reward that tells better answers from worse ones"
            )
        return (
            f"all responses of the last iterations got the same reward, {value:.3g}, so there is "
            f"nothing to learn; {why}"
        )

    def _dropped(self, row: dict[str, float]) -> str | None:
        dropped, samples = row.get("dropped", 0.0), row.get("samples", 0.0)
        undrawn, failed = row.get("undrawn", 0.0), row.get("failed_episodes", 0.0)
        if not dropped:
            return None
        why = ["a reward function returned None for them"] * (dropped > undrawn + failed)
        if failed:
            why.append(f"{failed:.0f} episodes of the agent failed (see the rollouts)")
        if undrawn:
            why.append(
                f"of {undrawn:.0f} a token could not be sampled, as the logits were not finite"
            )
        return (
            f"{dropped:.0f} of {samples:.0f} responses ({dropped / samples:.0%}) are excluded: "
            + " or ".join(why)
        )

    def _clipped(self) -> str | None:
        share = self._mean(self.latest, "score_clip_fraction")
        if share is None or share < 0.3:
            return None
        return (
            f"{share:.0%} of the scores are at --clip_reward_value, where their differences are "
            "lost: raise it, or use --reward_scaling initial"
        )

    def _judged(self) -> str | None:
        if len(self.evaluations) < 2:
            return None
        first, last = self.evaluations[0], self.evaluations[-1]
        if "judge" not in first or "judge" not in last:
            return None
        gain, loss = last["reward"] - first["reward"], first["judge"] - last["judge"]
        # The standard error of a single judgement is NaN, and no comparison with it holds.
        errors = _errors_of_change(first, last, "judge", is_first=True, unknown=0.0)
        limit = _fall(errors, comparisons=len(self.evaluations) - 1)
        if not (gain > 0 and loss > limit):
            return None
        return (
            f"the reward rose on held-out prompts ({first['reward']:.3g} to {last['reward']:.3g}) "
            f"while the judge's score fell ({first['judge']:.3g} to {last['judge']:.3g}): the "
            "policy exploits the reward model; raise --kl_coef, stop earlier, or fix the reward"
        )

    def _held_out(self) -> str | None:
        """Against the best evaluation before."""
        if len(self.evaluations) < 2 or not self.learns_from_rewards:
            return None
        *earlier, last = self.evaluations
        known = [row for row in earlier if math.isfinite(row.get("reward", math.nan))]
        best = max(known, key=lambda row: row["reward"], default=last)
        is_first = best is self.evaluations[0]
        errors = _errors_of_change(best, last, "reward", is_first=is_first, unknown=math.nan)
        # Before the first iteration none is known: those that followed tell.
        trained = best.get("train_reward", self._mean(self.first, "reward"))
        if trained is None or "reward" not in last:
            return None
        gain, loss = last.get("train_reward", math.nan) - trained, best["reward"] - last["reward"]
        # The best of noisy evaluations is above their mean: each pair was a chance to fall.
        limit = _fall(errors, comparisons=math.comb(len(self.evaluations), 2))
        if not (gain > 0 and loss > limit):
            return None
        return (
            f"the reward rose in training ({trained:.3g} to {last['train_reward']:.3g}) while it "
            f"fell on held-out prompts ({best['reward']:.3g} to {last['reward']:.3g}): the policy "
            "overfits its training prompts; use more prompts, raise --kl_coef, or stop earlier"
        )


def _errors_of_change(
    before: Mapping[str, float],
    after: Mapping[str, float],
    name: str,
    *,
    is_first: bool,
    unknown: float,
) -> list[float]:
    """Standard errors of two means, or that of their change where ``before`` is what it is from."""
    paired = after.get(f"{name}_change_standard_error", math.nan)
    if is_first and not math.isnan(paired):
        return [paired]
    return [row.get(f"{name}_standard_error", unknown) for row in (before, after)]


def _fall(errors: Sequence[float], *, comparisons: int) -> float:
    """The difference of two means with these standard errors that is a fall.

    The chance that noise makes one is that of ``FALL`` errors over all comparisons (Bonferroni).
    """
    normal = NormalDist()
    return -normal.inv_cdf(normal.cdf(-FALL) / comparisons) * math.hypot(*errors)


def _numbers(metrics: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    return {name: float(v) for name in names if (v := metrics.get(name)) is not None}
