"""Data of runs as HTML: types, lengths, and what was dropped and why."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from dschat_lora.report.markup import amount, html_table, meter, safe, short, value_text
from dschat_lora.report.story import StageStory

# Count in the audit, and what it means; zeros are left out.
_REASONS = (
    ("bad_rows", "not usable: the reasons are below"),
    ("empty_rows", "of these, with an empty text"),
    ("dropped_rows", "dropped: longer than the limit"),
    ("truncated_rows", "cut at the limit"),
    ("split_rows", "cut into several samples"),
    ("identical_rows", "pairs of equal answers, left out"),
    ("duplicate_rows", "repeat an earlier row"),
    ("overlap_rows", "training rows that are held out too"),
    ("shared_prompt_rows", "held-out pairs whose prompt is in training pairs"),
    ("doubled_bos_rows", "brought a second beginning-of-sequence, kept once"),
    ("eval_dropped_rows", "held-out rows dropped: longer than the limit"),
    ("eval_identical_rows", "held-out pairs of equal answers, left out"),
)


def data_section(story: StageStory) -> str:
    """Counts of a run's data, the fate of rows, lengths and examples of bad rows; folded."""
    audit = story.part("data").get("audit")
    if not isinstance(audit, Mapping):
        return ""
    rows = [[name, text] for name, text in _counts(audit).items() if text]
    rows += [
        [f"{amount(audit.get(name)):,.0f} rows", reason]
        for name, reason in _REASONS
        if amount(audit.get(name))
    ]
    examples = audit.get("bad_row_examples")
    bad = (
        "".join(f"<li><bdi>{safe(each)}</bdi></li>" for each in examples[:20])
        if isinstance(examples, list)
        else ""
    )
    parts = [
        html_table(["data", "what"], rows, kind="settings"),
        _lengths(audit),
        f"<h4>Rows that cannot be used</h4><ul>{bad}</ul>" if bad else "",
    ]
    return f"<details><summary>Data</summary>{''.join(parts)}</details>"


def _counts(audit: Mapping[str, Any]) -> dict[str, str]:
    types = audit.get("rows_by_type")
    tokens, supervised = amount(audit.get("tokens")), amount(audit.get("supervised_tokens"))
    samples, ended = amount(audit.get("train_samples")), amount(audit.get("eos_samples"))
    learnt = f"{supervised:,.0f} ({supervised / tokens:.1%} of the tokens)" if tokens else ""
    return {
        "rows by type": ", ".join(f"{value_text(n)} {kind}" for kind, n in types.items())
        if isinstance(types, Mapping)
        else "",
        "training": f"{amount(audit.get('train_rows')):,.0f} rows, {samples:,.0f} samples, "
        f"{tokens:,.0f} tokens",
        "held out": f"{amount(audit.get('eval_rows')):,.0f} rows, "
        f"{amount(audit.get('eval_samples')):,.0f} samples",
        "tokens with a loss": learnt if supervised else "",
        "samples that end in end-of-sequence": f"{ended:,.0f}" if ended else "",
        "limit": f"{short(amount(audit.get('max_seq_len')))} tokens",
    }


def _lengths(audit: Mapping[str, Any]) -> str:
    """Quantiles of the lengths of training rows, and a histogram."""
    quantiles, longer = audit.get("length_quantiles"), audit.get("longer_rows")
    if not isinstance(quantiles, Mapping) or not isinstance(longer, Mapping):
        return ""
    words = ", ".join(f"{name} {value_text(n)}" for name, n in quantiles.items())
    total = amount(audit.get("train_rows"))
    counts = [total, *map(amount, longer.values())]
    inside = [first - second for first, second in pairwise([*counts, 0.0])]
    names = [*(f"up to {limit} tokens" for limit in longer), "more"]
    rows = [
        [name, meter(count / total, name) if total else "", f"{count:,.0f} rows"]
        for name, count in zip(names, inside, strict=True)
        if count > 0
    ]
    table = html_table(["length", "share", "rows"], rows, kind="bars", markup=(1,))
    return f"<p>Tokens of training rows before any was cut: {safe(words)}.</p>{table}"
