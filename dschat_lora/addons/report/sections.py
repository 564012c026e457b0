"""The rows and texts of a report's sections: results, settings, data, cost, responses."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dschat_lora.addons.report.markup import amount, number, value_text
from dschat_lora.addons.report.rollouts import RolloutQuery, rollout_text, select_rollouts
from dschat_lora.addons.report.run_data import RunData
from dschat_lora.config.addons import load, provided
from dschat_lora.config.data import mixture_shares, split_weight
from dschat_lora.report.texts import as_written, duration, operations, short, without_end

LEAST_LOSSES = (0.1, 0.7, 2.0, 4.0)  # nats, from which a token has a darker shade
MOST_SAMPLES = 20  # answers to held-out prompts, of which these stand first
FIRST_SAMPLES = 3
LONG_LINES, LONG_CHARACTERS = 4, 300  # of a text from which it is folded
SHOWN_ROLLOUTS = 5  # of each selection
MOST_BYTES = 400_000  # of responses that a page can search, all runs of a stage together
MOST_CHARACTERS = 4000  # of a text, of all runs together
ROLLOUT_TITLES = {
    "best": "Highest reward",
    "worst": "Lowest reward",
    "changed": "Prompts whose reward changed most: the best response before and after",
}
_TOKEN_FIELDS = ("tokens", "token_advantage", "token_kl", "token_value")
THROUGHPUT = {
    "step_seconds": "s a step",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "tflops_per_device": "TFLOPs per device",
    "mfu": "MFU",
}
# Parts of the estimate in run.json, and what they are.
_MEMORY = {
    "weights": "weights",
    "training": "gradients, moments, adapters",
    "update": "activations and logits of an update",
    "cache": "keys and values while generating",
    "peak": "estimated peak",
}
# Settings whose names hold one of these are shown before the others.
MATTERS = (
    *("model_name", "data_path", "seed", "dtype", "lora_dim", "lora_alpha", "target_modules"),
    *("learning_rate", "batch_size", "gradient_accumulation", "epochs", "max_steps", "seq_len"),
    *("scheduler", "warmup", "zero_stage", "kl_coef", "cliprange", "gamma", "lam", "temperature"),
    *("top_p", "top_k", "answer", "reward_loss", "packing"),
)
_OWN = ("output_dir", "overwrite_output_dir", "tensorboard_path")  # differ in every run
# Count in the audit, and what it means; zeros are left out.
_REASONS = {
    "bad_rows": "not usable: the reasons are below",
    "empty_rows": "of these, with an empty text",
    "dropped_rows": "dropped: longer than the limit",
    "partly_dropped_rows": "lost samples that are longer than the limit",
    "truncated_rows": "cut at the limit",
    "split_rows": "cut into several samples",
    "identical_rows": "pairs of equal answers, left out",
    "duplicate_rows": "repeat an earlier row",
    "overlap_rows": "training rows that are held out too",
    "shared_prompt_rows": "held-out pairs whose prompt is in training pairs",
    "doubled_bos_rows": "brought a second beginning-of-sequence, kept once",
    "eval_dropped_rows": "held-out rows dropped: longer than the limit",
    "eval_partly_dropped_rows": "held-out rows that lost samples longer than the limit",
    "eval_identical_rows": "held-out pairs of equal answers, left out",
}

SOURCE_HEADER = [
    *("source", "share asked for", "share of samples", "tokens", "epochs"),
    *("loss, first", "loss, last", "held-out loss, first", "held-out loss, last"),
]

Rows = list[list[Any]]
Versions = dict[Any, list[tuple[str, Any]]]  # what is said of each version of a text, and its text


def results(run: RunData) -> list[str]:
    """The results in run.json, those before and after in one line."""
    lines, values = [], run.part("results")
    words = {k: short(v) if isinstance(v, float) else value_text(v) for k, v in values.items()}
    for name, value in words.items():
        quantity = name.removesuffix(" before")
        after = words.get(f"{quantity} after")
        if name != quantity and after is not None:
            lines.append(f"{quantity}: {value} \u2192 {after}")
        elif f"{name.removesuffix(' after')} before" not in words:
            lines.append(f"{name}: {value}")
    return lines


def settings(run: RunData) -> tuple[Rows, Rows]:
    """Command, versions and the options that matter; and all other options."""
    facts, command = run.facts, run.facts.get("command")
    shown = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        **{k: facts.get(k) for k in ("started", "git_commit", "platform", "world_size")},
        "dtype used": facts.get("dtype"),
        **{f"learns ({role})": each.get("words") for role, each in run.objects("learns").items()},
        "versions": ", ".join(f"{k} {value_text(v)}" for k, v in run.part("versions").items()),
        "data fingerprint": run.part("data").get("fingerprint"),
    }
    others: Rows = []
    for name, value in run.config.items():
        if any(each in name for each in MATTERS):
            shown[name] = value
        else:
            others.append([name, value_text(value)])
    return [[k, value_text(v)] for k, v in shown.items() if v not in (None, "")], others


def differences(runs: Sequence[RunData]) -> Rows:
    """The options in which runs of a stage differ."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in _OWN)
    rows = []
    for name in names:
        values = [value_text(run.config[name]) if name in run.config else "-" for run in runs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


def data_rows(audit: Mapping[str, Any]) -> Rows:
    """Counts of a run's data, and of rows that were not used as they are."""
    types = audit.get("rows_by_type")
    tokens, supervised = amount(audit.get("tokens")), amount(audit.get("supervised_tokens"))
    ended = amount(audit.get("eos_samples"))
    learnt = f"{supervised:,.0f} ({supervised / tokens:.1%} of the tokens)" if tokens else ""
    counts = {
        "rows by type": ", ".join(f"{value_text(n)} {kind}" for kind, n in types.items())
        if isinstance(types, Mapping)
        else "",
        "training": f"{amount(audit.get('train_rows')):,.0f} rows, "
        f"{amount(audit.get('train_samples')):,.0f} samples, {tokens:,.0f} tokens",
        "held out": f"{amount(audit.get('eval_rows')):,.0f} rows, "
        f"{amount(audit.get('eval_samples')):,.0f} samples",
        "tokens with a loss": learnt if supervised else "",
        "inputs beside text": str(audit.get("media_words") or ""),
        "samples that end in end-of-sequence": f"{ended:,.0f}" if ended else "",
        "limit": f"{short(amount(audit.get('max_seq_len')))} tokens",
    }
    left_out = audit.get("left_out")
    fates = {reason: audit.get(name) for name, reason in _REASONS.items()} | {
        f"left out: {what}": rows
        for what, rows in (left_out if isinstance(left_out, Mapping) else {}).items()
    }
    return [[name, text] for name, text in counts.items() if text] + [
        [f"{amount(rows):,.0f} rows", reason] for reason, rows in fates.items() if amount(rows)
    ]


def source_rows(run: RunData) -> Rows:
    """Of each source of several, what :data:`SOURCE_HEADER` names; else empty.

    Shares are of samples; where ``--data_path`` asks for none, none is said.
    """
    last = run.train[-1] if run.train else {}
    names = [key.removeprefix("samples/") for key in last if key.startswith("samples/")]
    if len(names) < 2:
        return []
    paths = run.config.get("data_path")
    weights = [split_weight(str(path))[1] for path in paths] if isinstance(paths, list) else []
    asked: dict[str, float] = {}
    if len(weights) == len(names) and all(weights):
        given = {name: weight or 0.0 for name, weight in zip(names, weights, strict=True)}
        asked = mixture_shares(given)
    drawn, tokens = (
        {name: sum(amount(line.get(f"{what}/{name}")) for line in run.train) for name in names}
        for what in ("samples", "tokens")
    )
    rows = []
    for name in names:
        losses = [
            [line[f"loss/{name}"] for line in lines if line.get(f"loss/{name}") is not None]
            for lines in (run.train, run.evals)
        ]
        rows.append(
            [
                name,
                f"{asked[name]:.1%}" if asked else "-",
                f"{drawn[name] / max(1.0, sum(drawn.values())):.1%}",
                f"{tokens[name]:,.0f}",
                short(number(last.get(f"epochs/{name}"))),
                *(short(number(own[at] if own else None)) for own in losses for at in (0, -1)),
            ]
        )
    return rows


def length_rows(audit: Mapping[str, Any]) -> tuple[str, Rows]:
    """Quantiles of the lengths of training rows in words, and a histogram; else empty."""
    quantiles, longer = audit.get("length_quantiles"), audit.get("longer_rows")
    if not isinstance(quantiles, Mapping) or not isinstance(longer, Mapping):
        return "", []
    words = ", ".join(f"{name} {value_text(n)}" for name, n in quantiles.items())
    total = amount(audit.get("train_rows"))
    counts = [total, *map(amount, longer.values()), 0.0]
    names = [*(f"up to {limit} tokens" for limit in longer), "more"]
    return f"Tokens of training rows before any was cut: {words}.", [
        [name, (more - rest) / total if total else "", f"{more - rest:,.0f} rows"]
        for name, (more, rest) in zip(names, pairwise(counts), strict=True)
        if more > rest
    ]


def bad_rows(audit: Mapping[str, Any]) -> Sequence[Any]:
    """The first of the rows that could not be used, and why."""
    examples = audit.get("bad_row_examples")
    return examples[:20] if isinstance(examples, list) else []


def title_of(run: RunData) -> str:
    """The run's stage and label."""
    return f"{run.name}, {run.label}" if run.label else run.name


def phase_rows(runs: Sequence[RunData]) -> Rows:
    """Of each phase its time, share of the run, that share again, operations and their rate."""
    rows = []
    for run in runs:
        phases = run.phases
        total = sum(seconds for seconds, _ in phases.values())
        for phase, (seconds, flops) in phases.items():
            name, share = f"{title_of(run)}: {phase}", seconds / total if total > 0 else 0.0
            rate = operations(flops / seconds) + "/s" if flops and seconds else "-"
            rows.append(
                [name, duration(seconds), f"{share:.1%}", share, operations(flops), rate],
            )
    return rows


def throughput_table(runs: Sequence[RunData]) -> tuple[list[str], Rows]:
    """Header and rows of the means of :data:`THROUGHPUT`; MFU is known of GPUs alone."""
    means = [(title_of(run), mean) for run in runs if (mean := run.part("throughput"))]
    known = [
        name
        for name in THROUGHPUT
        if not all(math.isnan(number(mean.get(name))) for _, mean in means)
    ]
    rows = [[title, *(short(number(mean.get(name))) for name in known)] for title, mean in means]
    return ["after warm-up", *(THROUGHPUT[name] for name in known)], rows


def memory_table(runs: Sequence[RunData]) -> tuple[list[str], Rows]:
    """Header and rows of the parts of the estimate, its peak, and the peak that was measured."""
    used = [run for run in runs if run.peak_memory or run.part("memory")]
    known = [key for key in _MEMORY if any(amount(run.part("memory").get(key)) for run in used)]
    rows = []
    for run in used:
        peak, estimates = run.peak_memory, run.part("memory")
        estimate = amount(estimates.get("peak"))
        ratio = f"{estimate / peak:.0%}" if estimate and peak else "-"
        sizes = [*(amount(estimates.get(key)) for key in known), peak]
        texts = [short(size / 2**30) if size else "-" for size in sizes]
        rows.append([title_of(run), *texts, *([ratio] if known else [])])
    header = ["GiB a process", *(_MEMORY[key] for key in known), "measured peak"]
    return header + (["estimated / measured"] if known else []), rows


def answers(runs: Sequence[RunData]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Each held-out prompt with its answers, those of all stages side by side."""
    prompts: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        for each in run.answers:
            when, prompt, answer = (str(each.get(k, "")) for k in ("when", "prompt", "answer"))
            answer = without_end(answer)
            name = when if len(runs) == 1 else f"{when} {run.label or run.name}"
            versions = prompts.setdefault(as_written(prompt), [])
            # A stage begins with the model that another one began or ended with.
            same = [n for n, (_, text) in enumerate(versions) if text == answer]
            if when == "before" and same:
                versions[same[-1]] = (f"{versions[same[-1]][0]}, {name}", answer)
            else:
                versions.append((name, answer))
    return [*prompts.items()]


def token_losses(run: RunData) -> list[list[tuple[str, Any]]]:
    """Versions of each held-out row: tokens, whether each is trained on, its loss and shade.

    The darkest of four shades is 4; 0 is none, below a loss of about 0.1 nats.
    """
    rows: Versions = {}
    for each in run.token_losses:
        name, tokens = str(each.get("name", "")), each["tokens"]
        shades = [  # of NaN the darkest
            0 if loss is None else sum(not loss < least for least in LEAST_LOSSES)
            for loss in each["loss"]
        ]
        row = [*zip(tokens, each["supervised"], each["loss"], shades, strict=True)]
        version = (f"{name} {each.get('when', '')}".strip(), row)
        rows.setdefault((name, "".join(tokens)), []).append(version)
    return [*rows.values()]


def selected_rollouts(run: RunData) -> dict[str, Versions]:
    """A few responses of training to each prompt, by the title of their selection.

    Prompts are texts with thumbnails, made by an add-on, of what is beside them.
    """
    query = RolloutQuery(best=SHOWN_ROLLOUTS, worst=SHOWN_ROLLOUTS, changed=SHOWN_ROLLOUTS)
    by_title: dict[str, Versions] = {}
    selected = select_rollouts(run.rollouts, query)
    media = [row.get("media", []) for rows in selected.values() for row in rows]
    made = [load(path)(media, run.config) for path in provided("thumbnails").values()]
    shown = iter([*made, [()] * len(media)][0])
    for selection, rows in selected.items():
        by_prompt = by_title.setdefault(ROLLOUT_TITLES[selection], {})
        for row in rows:
            version = (rollout_text(row), row["response"])
            prompt = as_written(row["prompt"]), next(shown)
            by_prompt.setdefault(prompt, []).append(version)
    return by_title


def cut(text: str, most: int) -> str:
    """A text without the space around it, and what it lacks if it is longer than ``most``."""
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more)"


def preview(text: str) -> str:
    """The first line of a text that is folded; empty where it is short enough to be shown."""
    if len(text) <= LONG_CHARACTERS and text.count("\n") < LONG_LINES:
        return ""
    return f"{text.strip().partition(chr(10))[0][:LONG_CHARACTERS]} ..."


def rollout_data(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Responses as JSON for the search, spread over the runs where they are too many."""
    rows, size = [], 0
    for run in runs:
        for row in run.rollouts:
            texts = {"prompt": as_written(row["prompt"]), "response": row["response"]}
            texts = {name: cut(text, MOST_CHARACTERS) for name, text in texts.items()}
            tokens = {k: row[k] for k in _TOKEN_FIELDS if isinstance(row.get(k), list)}
            # About as many bytes as the JSON of a row.
            size += 150 + len(json.dumps([*texts.values()])) + 12 * sum(map(len, tokens.values()))
            rows.append((run, row, texts, tokens))
    every = max(1, -(-size // MOST_BYTES))
    return [
        {
            **{name: _rounded(row.get(name)) for name in ("reward", "advantage", "kl")},
            **{
                name: [each if isinstance(each, str) else _rounded(each) for each in values]
                for name, values in tokens.items()
            },
            "iteration": row["iteration"],
            **texts,
            "cut": not row.get("ended"),
            "words": (f"{run.label}: " if len(runs) > 1 else "") + rollout_text(row),
        }
        for run, row, texts, tokens in rows[::every]
    ]


def _rounded(value: object) -> float | None:
    """Four digits; None for what is no finite number."""
    try:
        rounded = float(f"{float(str(value)):.4g}")
    except ValueError:
        return None
    return rounded if abs(rounded) < 1e300 else None
