"""The best, worst and most changed responses of step 3, read from ``rollouts.jsonl.gz``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.config.files import parse_json, read_bytes
from dschat_lora.config.plurals import counted
from dschat_lora.report.rollout_file import FILE, members
from dschat_lora.report.terminal import log_once, print_json
from dschat_lora.report.texts import as_written, visible

Rollout = Mapping[str, Any]
MOST_UNPACKED = 2**30  # bytes of all responses, which are in memory at once


def read_rollouts(directory: Path) -> list[dict[str, Any]]:
    """Responses that a run kept, in the order of iterations; what is cut off is left out.

    Raises:
        ValueError: if there is no such file, or it is none of a run.
    """
    path = directory / FILE
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: give the output directory of a run of step 3 that wrote its "
            "responses (--log_rollouts)"
        )
    rows: list[dict[str, Any]] = []
    try:
        for text, _ in members(read_bytes(path, most=MOST_UNPACKED), most=MOST_UNPACKED):
            for line in text.splitlines():
                rows.append(parse_json(line))
                if not _is_rollout(rows[-1]):
                    raise ValueError(f"line {len(rows)} is none")
    except ValueError as error:
        raise ValueError(f"{path} holds no responses of a run: {error}") from error
    return rows


def _is_rollout(row: object) -> bool:
    """Whether a row has what every response has; a number may be null, or "nan" and the like."""
    if not isinstance(row, dict):
        return False
    sequences, media = row.get("earlier_sequences", []), row.get("media", [])
    rewards = row.get("rewards")
    if not isinstance(rewards, dict) or type(row.get("iteration")) is not int:
        return False
    for rows in (sequences, media):
        if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
            return False
    texts = [each.get(name) for each in (row, *sequences) for name in ("prompt", "response")]
    texts += [row.get("failure", ""), *(m.get(n, "") for m in media for n in ("digest", "path"))]
    numbers = [row.get(name) for name in ("reward", "advantage", "kl", "length")]
    try:
        [float(n) for n in (*numbers, *rewards.values()) if n is not None]
    except (TypeError, ValueError, OverflowError):
        return False
    return all(isinstance(text, str) for text in texts)


@dataclass(frozen=True)
class RolloutQuery:
    """What to look at; several selections are shown one after another."""

    best: int = 0
    worst: int = 0
    changed: int = 0  # prompts
    failed: int = 0
    contains: str | None = None  # text of prompt or response
    prompt: str | None = None  # text of the prompt
    limit: int = 20  # responses of the last two


def show_rollouts(directory: Path, query: RolloutQuery, *, json: bool) -> None:
    """Print what a ``query`` finds of a run's responses.

    Raises:
        ValueError: if the run kept no responses.
    """
    rows = read_rollouts(directory)
    selected = select_rollouts(rows, query)
    if json:
        print_json({**_summary(rows), **selected}, indent=None)
        return
    lines = [summary_text(rows)]
    for name, chosen in selected.items():
        lines += [f"{name}:", *([] if chosen else ["  none"])]
        for row in chosen:
            lines.append(f"  {rollout_text(row)}")
            media = [each.get("path") or each.get("digest", "") for each in row.get("media", ())]
            lines += [f"    with {', '.join(media)}"] * bool(media)
            for each in (*row.get("earlier_sequences", ()), row):
                lines += _indented(as_written(each["prompt"]), "    ")
                lines += _indented(each["response"].strip(), "    -> ")
    log_once("\n".join(lines))


def _indented(text: str, start: str) -> list[str]:
    """The lines of a text after ``start``, control characters written out."""
    first, *others = map(visible, text.splitlines() or [""])
    return [start + first, *((" " * len(start) + line).rstrip() for line in others)]


def select_rollouts(rows: Sequence[Rollout], query: RolloutQuery) -> dict[str, list[Rollout]]:
    """Responses by the name of the selection.

    ``contains`` filters whatever else is selected; alone it is a selection of its own. ``changed``
    has, of each prompt, the best response of the first and of the last iteration it came in.
    """
    text = query.contains
    if text is not None:
        rows = [row for row in rows if text in row["prompt"] or text in row["response"]]
    scored = sorted((row for row in rows if row["reward"] is not None), key=_reward)
    selected: dict[str, list[Rollout]] = {}
    if query.best:
        selected["best"] = scored[::-1][: query.best]
    if query.worst:
        selected["worst"] = scored[: query.worst]
    if query.changed:
        selected["changed"] = _most_changed(scored, query.changed)
    if query.failed:
        selected["failed"] = [row for row in rows if row.get("failure")][-query.failed :]
    if query.prompt is not None:
        own = [row for row in rows if query.prompt in row["prompt"]]
        own.sort(key=lambda row: row["iteration"])
        if len(own) > query.limit:  # at even distances, the first and the last among them
            last = len(own) - 1
            own = [own[n * last // max(1, query.limit - 1)] for n in range(query.limit)]
        selected["prompt"] = own
    if text is not None and not selected:
        selected["contains"] = list(rows[: query.limit])
    return selected


def _most_changed(rows: Sequence[Rollout], count: int) -> list[Rollout]:
    """First and last best responses to the prompts whose mean reward changed most."""
    by_prompt: dict[str, list[Rollout]] = {}
    for row in rows:
        by_prompt.setdefault(_prompt(row), []).append(row)
    pairs = []
    for iterations in map(_by_iteration, by_prompt.values()):
        first, last = iterations[min(iterations)], iterations[max(iterations)]
        if first is not last:
            pairs.append((abs(_mean(last) - _mean(first)), first[-1], last[-1]))
    pairs.sort(key=lambda pair: -pair[0])
    return [row for _, *both in pairs[:count] for row in both]


def _prompt(row: Rollout) -> str:
    """A prompt with all that is beside its text."""
    return "\n".join([row["prompt"], *map(str, row.get("media", ()))])


def _by_iteration(rows: Sequence[Rollout]) -> dict[int, list[Rollout]]:
    by_iteration: dict[int, list[Rollout]] = {}
    for row in rows:
        by_iteration.setdefault(row["iteration"], []).append(row)
    return by_iteration


def _reward(row: Rollout) -> float:
    return float(row["reward"])


def _mean(rows: Sequence[Rollout]) -> float:
    return sum(map(_reward, rows)) / len(rows)


def _summary(rows: Sequence[Rollout]) -> dict[str, Any]:
    """Counts of all responses, and the mean reward of the first and the last iteration."""
    scored = _by_iteration([row for row in rows if row["reward"] is not None])
    return {
        "responses": len(rows),
        "prompts": len(set(map(_prompt, rows))),
        "iterations": len({row["iteration"] for row in rows}),
        "first_reward": _mean(scored[min(scored)]) if scored else None,
        "last_reward": _mean(scored[max(scored)]) if scored else None,
    }


def summary_text(rows: Sequence[Rollout]) -> str:
    """Number of responses, prompts and iterations, and how the reward changed, in a sentence."""
    summary = _summary(rows)
    return (
        f"{counted(summary['responses'], 'response')} to {counted(summary['prompts'], 'prompt')} "
        f"in {counted(summary['iterations'], 'iteration')}; mean reward "
        f"{_number(summary['first_reward'])} in the first, {_number(summary['last_reward'])} in "
        "the last"
    )


def rollout_text(row: Rollout) -> str:
    """What is known of a response, in a line."""
    parts = [f"{name} {_number(value)}" for name, value in row["rewards"].items()]
    more = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    ended = "" if row.get("ended") else f", {row.get('failure') or 'cut off'}"
    return (
        f"iteration {row['iteration']}, reward {_number(row['reward'])}{more}, advantage "
        f"{_number(row['advantage'])}, KL {_number(row['kl'])}, "
        f"{_number(row['length'])} tokens{ended}"
    )


def _number(value: str | float | None) -> str:
    return "-" if value is None else f"{float(value):.3g}"
