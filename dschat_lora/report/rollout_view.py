"""Selections of a run's rollouts, and how they are shown: best, worst, changed most, one prompt."""

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.report.rollout_file import read_rollouts
from dschat_lora.report.terminal import log_once

Rollout = Mapping[str, Any]


@dataclass(frozen=True)
class RolloutQuery:
    """What to look at; several selections are shown one after another."""

    best: int = 0
    worst: int = 0
    changed: int = 0  # prompts
    contains: str | None = None  # text of prompt or response
    prompt: str | None = None  # text of the prompt
    limit: int = 20  # responses of the last two


def show_rollouts(directory: Path, *, json: bool, **selection: Any) -> None:
    """Print what a run's ``selection``, fields of :class:`RolloutQuery`, finds.

    Raises:
        ValueError: if the run kept no responses.
    """
    rows, query = read_rollouts(directory), RolloutQuery(**selection)
    log_once(rollouts_json(rows, query) if json else "\n".join(rollouts_text(rows, query)))


def select_rollouts(rows: Sequence[Rollout], query: RolloutQuery) -> dict[str, list[Rollout]]:
    """Responses by the name of the selection.

    ``contains`` filters whatever else is selected; alone it is a selection of its own. ``changed``
    has, of each prompt, the best response of the first and of the last iteration it came in.
    """
    text = query.contains
    if text is not None:
        rows = [row for row in rows if text in row["prompt"] or text in row["response"]]
    counted = sorted((r for r in rows if _score(r) is not None), key=_score_or_zero)
    found: dict[str, list[Rollout]] = {}
    if query.best:
        found["best"] = counted[::-1][: query.best]
    if query.worst:
        found["worst"] = counted[: query.worst]
    if query.changed:
        found["changed"] = _changed(counted, query.changed)
    if query.prompt is not None:
        own = [row for row in rows if query.prompt in row["prompt"]]
        found["prompt"] = _spread(sorted(own, key=lambda row: row["iteration"]), query.limit)
    if text is not None and not found:
        found["contains"] = list(rows[: query.limit])
    return found


def _spread(rows: Sequence[Rollout], count: int) -> list[Rollout]:
    """``count`` of the rows at even distances, the first and the last among them."""
    if len(rows) <= count:
        return list(rows)
    return [rows[n * (len(rows) - 1) // max(1, count - 1)] for n in range(count)]


def _changed(rows: Sequence[Rollout], count: int) -> list[Rollout]:
    """First and last best responses to the prompts whose mean reward changed most."""
    by_prompt: dict[str, dict[int, list[Rollout]]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], {}).setdefault(row["iteration"], []).append(row)
    pairs = []
    for iterations in by_prompt.values():
        first, last = iterations[min(iterations)], iterations[max(iterations)]
        if first is not last:
            pairs.append((abs(_mean(last) - _mean(first)), first[-1], last[-1]))
    pairs.sort(key=lambda pair: -pair[0])
    return [row for _, *both in pairs[:count] for row in both]


def rollout_summary(rows: Sequence[Rollout]) -> dict[str, Any]:
    """Counts of all responses, and the mean reward of the first and the last iteration."""
    by_iteration: dict[int, list[Rollout]] = {}
    for row in rows:
        if _score(row) is not None:
            by_iteration.setdefault(row["iteration"], []).append(row)
    return {
        "responses": len(rows),
        "prompts": len({row["prompt"] for row in rows}),
        "iterations": len({row["iteration"] for row in rows}),
        "first_reward": _mean(by_iteration[min(by_iteration)]) if by_iteration else None,
        "last_reward": _mean(by_iteration[max(by_iteration)]) if by_iteration else None,
    }


def rollouts_json(rows: Sequence[Rollout], query: RolloutQuery) -> str:
    """Summary and selections as one JSON object."""
    return json_text.dumps(
        {**rollout_summary(rows), **select_rollouts(rows, query)}, ensure_ascii=False
    )


def rollouts_text(rows: Sequence[Rollout], query: RolloutQuery) -> list[str]:
    """Summary and selections as lines for a terminal."""
    lines = [summary_text(rows)]
    for name, chosen in select_rollouts(rows, query).items():
        lines += [f"{name}:"] + [line for row in chosen for line in _lines(row)]
        if not chosen:
            lines.append("  none")
    return lines


def _lines(row: Rollout) -> list[str]:
    return [f"  {rollout_words(row)}", f"    {row['prompt']!r}", f"    -> {row['response']!r}"]


def summary_text(rows: Sequence[Rollout]) -> str:
    """:func:`rollout_summary` in a sentence."""
    summary = rollout_summary(rows)
    return (
        f"{summary['responses']:,} responses to {summary['prompts']:,} prompts in "
        f"{summary['iterations']:,} iterations; mean reward {_number(summary['first_reward'])} in "
        f"the first, {_number(summary['last_reward'])} in the last"
    )


def rollout_words(row: Rollout) -> str:
    """What is known of a response, in a line."""
    parts = [f"{name} {_number(value)}" for name, value in row["rewards"].items()]
    more = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    ended = "" if row.get("ended") else ", cut off"
    return (
        f"iteration {row['iteration']}  reward {_number(row['reward'])}{more}  advantage "
        f"{_number(row['advantage'])}  kl {_number(row['kl'])}  {row['length']} tokens{ended}"
    )


def _score(row: Rollout) -> float | None:
    return None if row["reward"] is None else float(row["reward"])


def _score_or_zero(row: Rollout) -> float:
    return _score(row) or 0.0


def _mean(rows: Sequence[Rollout]) -> float:
    return sum(map(_score_or_zero, rows)) / len(rows)


def _number(value: Any) -> str:
    return "-" if value is None else f"{float(value):.3g}"
