"""Answers of runs in their report: to held-out prompts, and the responses of training."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from dschat_lora.report.markup import safe
from dschat_lora.report.rollout_view import (
    Rollout,
    RolloutQuery,
    rollout_words,
    select_rollouts,
    summary_text,
)
from dschat_lora.report.samples import LEAST_LOSSES, loss_html
from dschat_lora.report.story import StageStory

MOST_SAMPLES = 20
SHOWN_ROLLOUTS = 5  # of each selection
MOST_BYTES = 400_000  # of responses that a page can search, all runs of a stage together
MOST_CHARACTERS = 4000  # of a text, of all runs together
ROLLOUT_TITLES = {
    "best": "Highest reward",
    "worst": "Lowest reward",
    "changed": "Prompts whose reward changed most: the best response before and after",
}
_TOKEN_FIELDS = ("tokens", "token_advantage", "token_kl", "token_value")


def answers_section(stages: Sequence[StageStory]) -> str:
    """Answers to each held-out prompt in columns, those of all stages side by side."""
    prompts: dict[str, list[tuple[str, str]]] = {}
    for story in stages:
        for each in story.answers:
            when, prompt, answer = (str(each.get(k, "")) for k in ("when", "prompt", "answer"))
            name = when if len(stages) == 1 else f"{when} {story.label or story.name}"
            answers = prompts.setdefault(prompt, [])
            # What a stage begins with is what the one before has ended with.
            if when == "before" and answers and answers[-1][1] == answer:
                answers[-1] = (f"{answers[-1][0]}, {name}", answer)
            else:
                answers.append((name, answer))
    if not prompts:
        return ""
    parts = ['<section id="answers"><h2>Answers to held-out prompts</h2>']
    most = MOST_CHARACTERS // len(stages)
    parts += [_sample(prompt, prompts[prompt], most) for prompt in [*prompts][:MOST_SAMPLES]]
    if len(prompts) > MOST_SAMPLES:
        parts.append(f"<p>and {len(prompts) - MOST_SAMPLES:,} more in run.json</p>")
    return "".join([*parts, "</section>\n"])


def _cut(text: str, most: int) -> str:
    """A text without the space around it, and what it lacks if it is longer than ``most``."""
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more)"


def _sample(prompt: str, answers: Sequence[tuple[str, str]], most: int) -> str:
    """A prompt, and under it its answers with what is said of each."""
    columns = "".join(
        f'<div><div class="when">{safe(when)}</div>'
        f'<div class="text" dir="auto">{safe(_cut(answer, most) or "(empty)")}</div></div>'
        for when, answer in answers
    )
    return (
        f'<div class="sample"><div class="text" dir="auto">{safe(_cut(prompt, most))}</div>'
        f'<div class="answers">{columns}</div></div>'
    )


def tokens_section(story: StageStory) -> str:
    """Held-out rows token by token, shaded by loss, before and after training; folded."""
    rows: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for each in story.token_losses:
        name, tokens, supervised = str(each.get("name", "")), each["tokens"], each["supervised"]
        shown = loss_html(tokens, supervised, each["loss"])
        rows.setdefault((name, "".join(tokens)), []).append((str(each.get("when", "")), shown))
    if not rows:
        return ""
    parts = [
        "<p><small>The darker a token, the greater its loss: shades begin at "
        f"{', '.join(f'{each:g}' for each in LEAST_LOSSES)} nats, and the pointer or a tap "
        "shows the number. Underlined tokens are trained on in rows like these.</small></p>"
    ]
    for (name, _), versions in rows.items():
        columns = "".join(
            f'<div><div class="when">{safe(f"{name} {when}".strip())}</div>{shown}</div>'
            for when, shown in versions
        )
        parts.append(f'<div class="sample"><div class="answers">{columns}</div></div>')
    return (
        f"<details><summary>Loss of each token of held-out rows</summary>{''.join(parts)}</details>"
    )


def rollouts_section(stories: Sequence[StageStory], group: int) -> str:
    """Responses of training: a search for the script, and a few that need none."""
    parts = [
        f"<h3>Responses of training</h3>{_browser(group)}"
        if any(s.rollouts for s in stories)
        else ""
    ]
    for story in stories:
        if not story.rollouts:
            continue
        name = f"<bdi>{safe(story.label)}</bdi>: " if len(stories) > 1 else ""
        parts.append(f"<p>{name}{safe(summary_text(story.rollouts))}</p>")
        query = RolloutQuery(best=SHOWN_ROLLOUTS, worst=SHOWN_ROLLOUTS, changed=SHOWN_ROLLOUTS)
        for selection, rows in select_rollouts(story.rollouts, query).items():
            by_prompt: dict[str, list[tuple[str, str]]] = {}
            for row in rows:
                answer = (rollout_words(row), row["response"])
                by_prompt.setdefault(row["prompt"], []).append(answer)
            most = MOST_CHARACTERS // len(stories)
            shown = "".join(_sample(prompt, by_prompt[prompt], most) for prompt in by_prompt)
            parts.append(
                f"<details><summary>{ROLLOUT_TITLES[selection]}</summary>{shown}</details>"
            )
    return "".join(parts)


def _browser(group: int) -> str:
    """Controls of the search; hidden until the script takes them."""
    orders = {
        "new": "latest first",
        "high": "highest reward",
        "low": "lowest reward",
        "advantage": "largest advantage",
        "kl": "largest KL",
    }
    options = "".join(f'<option value="{key}">{text}</option>' for key, text in orders.items())
    return (
        f'<div class="browser" data-group="{group}" hidden><div class="controls">'
        '<label>Search <input type="search" class="text-filter"></label>'
        f'<label>Order <select class="order">{options}</select></label>'
        '<label>Reward from <input type="number" step="any" class="least"></label>'
        '<label>to <input type="number" step="any" class="most"></label>'
        '<label><input type="checkbox" class="cut"> cut off only</label>'
        '<label class="token-choice" hidden>Colour tokens by <select class="by"></select></label>'
        '</div><p class="count" role="status"></p><div class="found"></div>'
        '<button type="button" class="more">Show more</button></div>'
    )


def rollout_data(stories: Sequence[StageStory]) -> list[dict[str, Any]]:
    """Responses as JSON for the search, spread over the run where they are too many."""
    rows = [(story, row) for story in stories for row in story.rollouts]
    sizes = [_size(row) for _, row in rows]
    every = max(1, -(-sum(sizes) // MOST_BYTES))
    return [_for_search(story, row, len(stories)) for story, row in rows[::every]]


def _size(row: Rollout) -> int:
    """About as many bytes as the JSON of a row."""
    texts = [_cut(row[name], MOST_CHARACTERS) for name in ("prompt", "response")]
    return 150 + len(json.dumps(texts)) + 12 * len(_numbers_of(row))


def _numbers_of(row: Rollout) -> list[Any]:
    found = (row.get(name) for name in _TOKEN_FIELDS)
    return [each for values in found if isinstance(values, list) for each in values]


def _for_search(story: StageStory, row: Rollout, runs: int) -> dict[str, Any]:
    known = {k: _rounded(row.get(k)) for k in ("reward", "advantage", "kl")}
    name = f"{story.label}: " if runs > 1 else ""
    tokens = {k: _list(row[k]) for k in _TOKEN_FIELDS if isinstance(row.get(k), list)}
    return (
        known
        | tokens
        | {
            "iteration": row["iteration"],
            "prompt": _cut(row["prompt"], MOST_CHARACTERS),
            "response": _cut(row["response"], MOST_CHARACTERS),
            "cut": not row.get("ended"),
            "words": name + rollout_words(row),
        }
    )


def _list(values: Iterable[Any]) -> list[Any]:
    return [each if isinstance(each, str) else _rounded(each) for each in values]


def _rounded(value: object) -> float | None:
    """Four digits; None for what is no finite number."""
    try:
        found = float(f"{float(str(value)):.4g}")
    except ValueError:
        return None
    return found if abs(found) < 1e300 else None
