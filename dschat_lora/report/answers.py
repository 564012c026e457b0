"""Answers of a run in its report: to held-out prompts, and the responses of training."""

from collections.abc import Sequence

from dschat_lora.report.markup import safe
from dschat_lora.report.rollout_view import (
    RolloutQuery,
    rollout_words,
    select_rollouts,
    summary_text,
)
from dschat_lora.report.story import StageStory

MOST_SAMPLES = 20
SHOWN_ROLLOUTS = 5  # of each selection
ROLLOUT_TITLES = {
    "best": "Highest reward",
    "worst": "Lowest reward",
    "changed": "Prompts whose reward changed most: the best response before and after",
}


def answers_section(story: StageStory) -> str:
    """Answers to each prompt in columns."""
    prompts: dict[str, list[tuple[str, str]]] = {}
    for each in story.answers:
        when, prompt, answer = (str(each.get(k, "")) for k in ("when", "prompt", "answer"))
        prompts.setdefault(prompt, []).append((when, answer))
    if not prompts:
        return ""
    parts = ["<h3>Answers to held-out prompts</h3>"]
    parts += [_sample(prompt, answers) for prompt, answers in [*prompts.items()][:MOST_SAMPLES]]
    if len(prompts) > MOST_SAMPLES:
        parts.append(f"<p>and {len(prompts) - MOST_SAMPLES:,} more in run.json</p>")
    return "".join(parts)


def _sample(prompt: str, answers: Sequence[tuple[str, str]]) -> str:
    """A prompt, and under it its answers with what is said of each."""
    columns = "".join(
        f'<div><div class="when">{safe(when)}</div>'
        f'<div class="text" dir="auto">{safe(answer.strip() or "(empty)")}</div></div>'
        for when, answer in answers
    )
    return (
        f'<div class="sample"><div class="text" dir="auto">{safe(prompt.strip())}</div>'
        f'<div class="answers">{columns}</div></div>'
    )


def rollouts_section(story: StageStory) -> str:
    """Responses of training: the best, the worst, and those whose prompts' reward changed most."""
    if not story.rollouts:
        return ""
    parts = [f"<h3>Responses of training</h3><p>{safe(summary_text(story.rollouts))}</p>"]
    query = RolloutQuery(best=SHOWN_ROLLOUTS, worst=SHOWN_ROLLOUTS, changed=SHOWN_ROLLOUTS)
    for name, rows in select_rollouts(story.rollouts, query).items():
        by_prompt: dict[str, list[tuple[str, str]]] = {}
        for row in rows:
            by_prompt.setdefault(row["prompt"], []).append((rollout_words(row), row["response"]))
        shown = "".join(map(_sample, by_prompt, by_prompt.values()))
        parts.append(f"<details><summary>{ROLLOUT_TITLES[name]}</summary>{shown}</details>")
    return "".join(parts)
