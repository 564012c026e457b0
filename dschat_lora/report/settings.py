"""Settings of runs as HTML: command, versions, options, and where the options of runs differ."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dschat_lora.report.markup import html_table, value_text
from dschat_lora.report.story import StageStory

# Settings whose names hold one of these are shown before the others.
MATTERS = (
    *("model_name", "data_path", "seed", "dtype", "lora_dim", "lora_alpha", "target_modules"),
    *("learning_rate", "batch_size", "gradient_accumulation", "epochs", "max_steps", "seq_len"),
    *("scheduler", "warmup", "zero_stage", "kl_coef", "cliprange", "gamma", "lam", "temperature"),
    *("top_p", "top_k", "answer", "reward_loss", "packing"),
)
_OWN = ("output_dir", "overwrite_output_dir", "tensorboard_path")  # differ in every run


def settings_section(story: StageStory) -> str:
    """Command and versions, the options that matter, then the others; folded."""
    facts = story.facts
    command = facts.get("command")
    origin = {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else command,
        **{k: facts.get(k) for k in ("started", "git_commit", "platform", "world_size")},
        "dtype used": facts.get("dtype"),
        **{f"learns ({role})": each.get("words") for role, each in story.objects("learns").items()},
        "versions": ", ".join(f"{k} {value_text(v)}" for k, v in story.part("versions").items()),
        "data fingerprint": story.part("data").get("fingerprint"),
    }
    matters = {k: v for k, v in story.config.items() if any(m in k for m in MATTERS)}
    others = {k: v for k, v in story.config.items() if k not in matters}
    shown = {k: v for k, v in (origin | matters).items() if v not in (None, "")}
    if not shown and not others:
        return ""
    rest = f"<details><summary>All other options</summary>{_table(others)}</details>"
    return (
        f"<details><summary>Settings and versions</summary>{_table(shown)}"
        f"{rest if others else ''}</details>"
    )


def _table(values: Mapping[str, Any]) -> str:
    rows = [[name, value_text(value)] for name, value in values.items()]
    return html_table(["setting", "value"], rows, kind="settings")


def differences(stories: Sequence[StageStory]) -> str:
    """A table of the options in which runs of a stage differ; empty of a single run."""
    if len(stories) < 2:
        return ""
    names = dict.fromkeys(name for story in stories for name in story.config if name not in _OWN)
    rows = []
    for name in names:
        values = [
            value_text(story.config[name]) if name in story.config else "-" for story in stories
        ]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return "<p>The options of these runs are the same.</p>"
    header = ["option", *(story.label for story in stories)]
    return html_table(header, rows, caption="Options that differ")
