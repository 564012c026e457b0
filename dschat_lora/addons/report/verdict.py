"""Verdict on a run in sentences: what was trained, whether it learned, its cost, what looks wrong.

A change counts where it exceeds twice its standard error: that of a paired test where evaluations
say it, else as of other samples, an upper bound; where none is known, half a percent of the value.
"""

import math
from dataclasses import dataclass

from dschat_lora.addons.report.curves import standard_error
from dschat_lora.addons.report.markup import amount, number, value_text
from dschat_lora.addons.report.run_data import RunData
from dschat_lora.config.addons import installed
from dschat_lora.config.plurals import counted
from dschat_lora.report.texts import duration, operations, short

TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dpo": "Preference optimization",
    "rlhf": "Reinforcement learning",
}
# Field of evaluations, the direction that is better (0: neither), and whether it is a share.
_RESULTS = (
    ("perplexity", -1, False),
    ("accuracy", 1, True),
    ("reward", 1, False),
    ("greedy_reward", 1, False),
    ("judge", 1, False),
    ("greedy_judge", 1, False),
    ("kl", 0, False),
    ("response_length", 0, False),
)
CLEAR_ERRORS, CLEAR_SHARE = 2.0, 0.005
MOST_REMARKS = 50
CHANGE_HEADER = ["held-out", "before", "after", "change"]
WORDS = {
    "learned": "Learned",
    "unclear": "No clear change",
    "worse": "Got worse",
    "mixed": "Mixed",
    "running": "Running",
    "failed": "Did not finish",
    "unknown": "Not evaluated",
}


@dataclass(frozen=True)
class Change:
    """A held-out quantity before and after."""

    name: str
    before: str
    after: str
    words: str  # the difference and its standard error
    outcome: str  # learned, unclear or worse; empty where neither direction is better

    @property
    def row(self) -> list[str]:
        """The columns of :data:`CHANGE_HEADER`."""
        return [self.name, self.before, self.after, self.words]


def title_of(stage: str) -> str:
    """What a person calls a stage."""
    titles = [addon.titles for addon in installed().values() if stage in addon.titles]
    return titles[0][stage] if titles else TITLES.get(stage, stage)


def name_of(field: str) -> str:
    """What tables call a field of evaluations."""
    return "KL to the reference" if field == "kl" else field.replace("_", " ")


def outcome_of(run: RunData) -> str:
    """The run in one of :data:`WORDS`."""
    if run.status == "running":
        return "running"
    if run.status.startswith(("failed", "interrupted")):
        return "failed"
    outcomes = {change.outcome for change in changes_of(run)}
    if {"learned", "worse"} <= outcomes:
        return "mixed"
    return next((each for each in ("worse", "learned", "unclear") if each in outcomes), "unknown")


def what_was_trained(run: RunData) -> str:
    """Algorithm, model, data and steps in a line."""
    config, audit = run.config, run.audit
    base = next((v for k, v in config.items() if k.endswith("model_name_or_path")), None)
    rank = number(next((v for k, v in config.items() if k.endswith("lora_dim")), None))
    how = (
        f"LoRA of rank {rank:.0f} on"
        if rank > 0
        else "all weights of"
        if rank == 0
        else "training of"
    )
    name = config.get("algorithm")
    if isinstance(name, str):
        how = f"{name if ':' in name else name.upper()}, {how}"
    parts = [f"{how[:1].upper()}{how[1:]} {value_text(base or 'the bundled tiny model')}"]
    trained, total = (number(run.part("parameters").get(k)) for k in ("trainable", "total"))
    if total > 0 and trained >= 0:
        parts[0] += f" ({trained:,.0f} of {total:,.0f} parameters)"
    if samples := amount(audit.get("train_samples")):
        parts.append(counted(round(samples), str(audit.get("kind", "samples")).removesuffix("s")))
        if held_out := amount(audit.get("eval_rows")):
            parts[-1] += f" ({counted(round(held_out), 'row')} held out)"
    if iterations := run.greatest("iteration"):
        parts.append(counted(round(iterations), "iteration"))
    parts.append(counted(round(run.steps), "optimizer step"))
    if epochs := run.greatest("epoch"):
        parts.append(f"{epochs:.3g} epoch{'s' * (epochs != 1)}")
    return ", ".join(parts)


def changes_of(run: RunData) -> list[Change]:
    """What the first and the last evaluation say of each result."""
    changes = []
    for name, better, share in _RESULTS:
        lines = [line for line in run.evals if not math.isnan(number(line.get(name)))]
        if len(lines) < 2:
            continue
        scale, unit = (100.0, "%") if share else (1.0, "")
        before, after = (scale * number(lines[n].get(name)) for n in (0, -1))
        errors = [scale * standard_error(lines[n], name) for n in (0, -1)]
        paired = scale * number(lines[-1].get(f"{name}_change_standard_error"))
        error = math.hypot(*errors) if math.isnan(paired) else paired
        limit = CLEAR_SHARE * abs(before) if math.isnan(error) else CLEAR_ERRORS * error
        gain = after - before
        clear = abs(gain) > limit
        outcome = "unclear" if not clear else "learned" if gain * better > 0 else "worse"
        words = f"{'+' * (gain > 0)}{_with_error(gain, error)}{unit}"
        words += " (within noise)" if better and gain and not clear else ""
        if name == "kl" and after < 0:
            words += " (an estimate, which may be below 0)"
        first, last = (short(value) + unit for value in (before, after))
        changes.append(Change(name_of(name), first, last, words, outcome if better else ""))
    return changes


def _with_error(value: float, error: float) -> str:
    """A value and its standard error, to two digits of that."""
    if math.isnan(error) or error <= 0:
        return short(value)
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:,.{decimals}f}\u00a0\u00b1\u00a0{error:.{decimals}f}"


def cost(run: RunData) -> str:
    """Time, operations, throughput and memory in a line."""
    parts = [duration(run.seconds)]
    if rate := amount(run.part("throughput").get("tokens_per_second")):
        parts.append(f"{rate:,.0f} tokens/s")
    if flops := sum(each for _, each in run.phases.values()):
        parts.append(operations(flops))
    if peak := run.peak_memory:
        parts.append(f"peak memory {peak / 2**30:.2f} GiB per device")
    if isinstance(resumed := run.facts.get("resumed"), list) and resumed:
        parts.append(f"resumed {counted(len(resumed), 'time')}")
    return ", ".join(parts)


def doubts(run: RunData) -> list[tuple[str, str]]:
    """What looks wrong and what to do, with where it was seen; of each text once."""
    steps_of: dict[str, list[str]] = {note: [] for note in run.notes}
    if run.status not in ("finished", "running", "unknown"):
        steps_of[f"The run ended early: {run.status}"] = []
    for line in run.events:
        text = ": ".join(value_text(line[name]) for name in ("event", "message") if name in line)
        text = text.removeprefix("warning: ")
        steps_of.setdefault(text, []).append(value_text(line.get("step", "?")))
    steps_of |= {text: [] for text in (*_of_training(run), *_of_data(run))}
    rows = []
    for text, steps in steps_of.items():
        more = f", ... ({len(steps):,} times)" if len(steps) > 5 else ""
        where = f"step {', '.join(steps[:5])}{more}" if steps else ""
        rows.append((text[:1].upper() + text[1:], where))
    left = len(rows) - MOST_REMARKS
    return rows[:MOST_REMARKS] + ([(f"and {left:,} more in metrics.jsonl", "")] if left > 0 else [])


def _of_training(run: RunData) -> list[str]:
    """Signs in the curves that nothing warned of while they were drawn."""
    doubts = []
    losses = [(number(e.get("loss")), number(e.get("step"))) for e in run.evals]
    losses = [each for each in losses if not math.isnan(each[0] + each[1])]
    if len(losses) > 2 and losses[-1][0] > (low := min(losses))[0] * 1.02 and low[0] > 0:
        doubts.append(
            f"held-out loss was lowest, {short(low[0])}, at step {short(low[1])} and is "
            f"{short(losses[-1][0])} at the end: later steps memorize the training data; train "
            "fewer steps, or at a lower learning rate"
        )
    if skipped := sum(line.get("skipped") is True for line in run.train):
        doubts.append(
            f"{counted(skipped, 'step')} changed no weight because the gradient was not finite: "
            "lower the learning rate, or use --dtype bf16"
        )
    cut = [number(line.get("truncated_fraction")) for line in run.train[-5:]]
    warned = any("responses are cut off" in str(line.get("message")) for line in run.events)
    if cut and not warned and (share := sum(cut) / len(cut)) > 0.3:
        doubts.append(
            f"{share:.0%} of the last responses are cut off: raise --max_answer_seq_len, or "
            "--missing_eos_penalty if answers should be short"
        )
    return doubts


def _of_data(run: RunData) -> list[str]:
    audit = run.audit
    rows, doubts = amount(audit.get("train_rows")), []
    names = ("dropped_rows", "partly_dropped_rows", "truncated_rows")
    cut = sum(amount(audit.get(name)) for name in names)
    if rows and cut > 0.1 * rows:
        doubts.append(
            f"{cut:,.0f} of {rows:,.0f} training rows were dropped or cut at "
            f"{short(number(audit.get('max_seq_len')))} tokens: raise the limit, or shorten them"
        )
    if bad := amount(audit.get("bad_rows")):
        doubts.append(f"{counted(round(bad), 'row')} could not be used: see Data")
    if rows and not amount(audit.get("eval_samples")):
        doubts.append("no row is held out, so nothing tells learning from memorizing")
    return doubts
