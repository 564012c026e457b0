"""Model card: the README.md of an adapter directory."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.checkpoint.quantization import located, stored_form, stored_kind


def model_card(
    config: AdapterConfig,
    *,
    title: str = "LoRA adapter",
    data: Mapping[str, Any],
    metrics: Mapping[str, Any],
    versions: Mapping[str, str | None],
    training: Mapping[str, Any] | None = None,
    auto: str | None = None,
    score_class: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """A model card in Markdown: front matter, how to load, settings, data, metrics, versions.

    ``training`` are rates, lengths and sizes of the run, ``auto`` is the class that loads the base
    (default: by the task), ``score_class`` Python that makes the class of a reward model, ``notes``
    are further paragraphs. A directory is named by :func:`public_name`.
    """
    stored = config.base_model_name_or_path
    base = "the base model" if stored is None else public_name(stored)
    targets = config.target_modules
    settings = {
        "rank": config.r,
        "alpha": config.lora_alpha,
        **{f"rank of {key.removeprefix('^')}": n for key, n in config.rank_pattern.items()},
        **{f"alpha of {key.removeprefix('^')}": n for key, n in config.alpha_pattern.items()},
        "rsLoRA": config.use_rslora,
        "dropout": config.lora_dropout,
        "target modules": targets if isinstance(targets, str) else ", ".join(targets),
        **({"parts": " ".join(config.enable_lora)} if config.enable_lora else {}),
        "biases": config.bias,
        **({"base": "4 bits (NF4, double quantisation)"} if config.base_bits == 4 else {}),
        "modules stored in full": ", ".join(config.modules_to_save) or "none",
    }
    front = ["---", "library_name: peft", "tags:", "- lora", "---"]
    reward = config.task_type == "SEQ_CLS"
    if not reward:
        front.insert(2, "pipeline_tag: text-generation")
    if stored is not None:
        # A JSON string is a valid YAML string, whatever the name holds.
        front.insert(1, f"base_model: {json.dumps(base)}")
        if (licence := license_of(stored)) is not None:
            front.insert(2, f"license: {licence}")
    sections = [("LoRA", settings), *([("Training", training)] if training is not None else [])]
    sections += [("Data", data), ("Metrics", metrics), ("Versions", versions)]
    auto = auto or ("AutoModelForSequenceClassification" if reward else "AutoModelForCausalLM")
    labels = ", num_labels=1" if reward else ""
    lines = [*front, "", f"# {title}", "", f"LoRA adapter for `{base}`, in the layout of PEFT:", ""]
    lines += [
        "```python",
        "from peft import PeftModel",
        *_load_base(auto, base, labels, config.base_bits, stored or "", score_class),
        _LOAD_LINE,
        "```",
    ]
    lines += ["", _SCORE_NOTE] if reward else ["", "A chat with it:", "", *_CHAT]
    for note in notes:
        lines += ["", note]
    for heading, rows in sections:
        lines += ["", f"## {heading}", ""]
        lines += ["| | |", "|---|---|"] if rows else ["Not recorded."]
        for pair in rows.items():
            texts = [f"{each:.6g}" if isinstance(each, float) else str(each) for each in pair]
            key, value = (text.replace("|", "\\|").replace("\n", " ") for text in texts)
            lines.append(f"| {key} | {value} |")
    return "\n".join(lines) + "\n"


def _load_base(
    auto: str, base: str, labels: str, bits: int | None, stored: str, score_class: Sequence[str]
) -> list[str]:
    """Python that loads the base as the adapter was trained on it."""
    config = Path(stored) / "config.json"
    fields = json.loads(config.read_text("utf-8")) if config.is_file() else {}
    where, more = located(base)
    arguments = [json.dumps(where), *(f"{k}={json.dumps(v)}" for k, v in more.items())]
    form = stored_form(fields, stored)
    config_class, lines = "" if form is None else form.transformers_class, []
    if config_class:
        lines = ["# Trained on the values that the files stand for, in 16 bits."]
        arguments.append(f"quantization_config={config_class}(dequantize=True)")
    elif bits == 4 and stored_kind(fields, stored) is None:
        config_class = "BitsAndBytesConfig"
        lines = [
            "# The adapter was trained on the base in these 4 bits; on another it answers "
            "otherwise.",
            "nf4 = BitsAndBytesConfig(",
            '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True',
            ")",
        ]
        arguments.append("quantization_config=nf4")
    return [
        f"from transformers import {', '.join(filter(None, (auto, config_class)))}",
        *score_class,
        "",
        *lines,
        f"base_model = {auto}.from_pretrained({', '.join(arguments)}{labels})",
    ]


def public_name(path: str) -> str:
    """A hub name as it is; a directory by the hub name it was fetched by, or by a relative path.

    A directory beyond the working directory is called by its own name alone.
    """
    fetched = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", path)
    if fetched:
        return f"{fetched[1]}/{fetched[2]}"
    if not Path(path).is_absolute():
        return path
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else Path(path).name


def license_of(base: str) -> str | None:
    """The licence that a local model's card or configuration states; None where neither does."""
    card, config = Path(base) / "README.md", Path(base) / "config.json"
    if card.is_file():
        front = re.match(r"---\n(.*?)\n---", card.read_text("utf-8", errors="replace"), re.DOTALL)
        stated = front and re.search(r"^license:[ \t]*([\w.-]+)[ \t]*$", front[1], re.MULTILINE)
        if stated:
            return stated[1]
    if config.is_file():
        stated_there = json.loads(config.read_text("utf-8")).get("license")
        if isinstance(stated_there, str) and re.fullmatch(r"[\w.-]+", stated_there):
            return stated_there
    return None


_CHAT = [
    "```python",
    "from transformers import AutoTokenizer",
    "",
    'tokenizer = AutoTokenizer.from_pretrained("path/of/this/directory")',
    'messages = [{"role": "user", "content": "What is 2 plus 3?"}]',
    "inputs = tokenizer.apply_chat_template(",
    '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
    ")",
    "answer = model.generate(**inputs, max_new_tokens=64)",
    'print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    "```",
]
_SCORE_NOTE = (
    "A reward model: it scores a prompt and answer that end in the end-of-sequence token, at that "
    "token. transformers finds it before the padding, so in a batch the base's `pad_token_id` must "
    "be another token than end-of-sequence; without one, score one sequence at a time."
)
_LOAD_LINE = 'model = PeftModel.from_pretrained(base_model, "path/of/this/directory")'
