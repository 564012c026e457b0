"""Model card: the README.md of an adapter directory."""

import json
from collections.abc import Mapping
from typing import Any

from dschat_lora.checkpoint.adapter_config import AdapterConfig


def model_card(
    config: AdapterConfig,
    *,
    title: str = "LoRA adapter",
    data: Mapping[str, Any],
    metrics: Mapping[str, Any],
    versions: Mapping[str, str | None],
) -> str:
    """A model card in Markdown: front matter, how to load, settings, data, metrics, versions."""
    base = config.base_model_name_or_path or "the base model"
    targets = config.target_modules
    settings = {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "rsLoRA": config.use_rslora,
        "dropout": config.lora_dropout,
        "target modules": targets if isinstance(targets, str) else ", ".join(targets),
        **({"parts": " ".join(config.enable_lora)} if config.enable_lora else {}),
        "biases": config.bias,
        "modules stored in full": ", ".join(config.modules_to_save) or "none",
    }
    front = ["---", "library_name: peft", "tags:", "- lora", "---"]
    if config.base_model_name_or_path is not None:
        # A JSON string is a valid YAML string, whatever the name holds.
        front.insert(1, f"base_model: {json.dumps(config.base_model_name_or_path)}")
    sections = [("LoRA", settings), ("Data", data), ("Metrics", metrics), ("Versions", versions)]
    reward = config.task_type == "SEQ_CLS"
    auto = "AutoModelForSequenceClassification" if reward else "AutoModelForCausalLM"
    labels = ", num_labels=1" if reward else ""
    lines = [*front, "", f"# {title}", "", f"LoRA adapter for `{base}`, in the layout of PEFT:", ""]
    lines += [
        "```python",
        "from peft import PeftModel",
        f"from transformers import {auto}",
        "",
        f"base_model = {auto}.from_pretrained({json.dumps(base)}{labels})",
        _LOAD_LINE,
        "```",
    ]
    if reward:
        lines += ["", _SCORE_NOTE]
    for heading, rows in sections:
        lines += ["", f"## {heading}", "", *_table(rows)]
    return "\n".join(lines) + "\n"


_SCORE_NOTE = (
    "A reward model: it scores a prompt and answer that end in the end-of-sequence token, at that "
    "token. transformers finds it before the padding, so in a batch the base's `pad_token_id` must "
    "be another token than end-of-sequence; without one, score one sequence at a time."
)
_LOAD_LINE = 'model = PeftModel.from_pretrained(base_model, "path/of/this/directory")'


def _table(rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return ["Not recorded."]
    return ["| | |", "|---|---|", *(f"| {_cell(k)} | {_cell(v)} |" for k, v in rows.items())]


def _cell(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
