"""The pipeline on the bundled model and data, and what it changed, as a table."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.cli.options import fail
from dschat_lora.config import LoraConfig, ModelConfig
from dschat_lora.lora.model import adapters_disabled
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.causal_lm import load_tokenizer
from dschat_lora.models.generate import answer
from dschat_lora.models.source import find_model
from dschat_lora.report.directory import claim_directory, leftovers
from dschat_lora.report.tables import table
from dschat_lora.report.terminal import say_once
from dschat_lora.world import judge

SFT_OPTIONS = {
    "lora_dim": 16,
    "lora_alpha": 32,
    "lora_learning_rate": 1.5e-3,
    "max_seq_len": 128,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 2,
    "num_warmup_steps": 10,
    "logging_steps": 20,
}
MAX_NEW_TOKENS = 40
BATCH_SIZE = 100


def run_demo(output_dir: str | None) -> None:
    """Run every stage as a user would, then judge held-out answers before and after.

    Args:
        output_dir: of all stages; None takes the first free of output/demo, -2, -3, ...
    """
    scripts = Path(__file__).parents[1] / "training"
    if not (scripts / "step1_sft" / "main.py").is_file():
        fail(f"the demo runs from a checkout of the repository: {scripts} has no step1_sft/main.py")
    if output_dir is not None and leftovers(Path(output_dir) / "sft"):
        fail(f"--output_dir {output_dir} holds an earlier demo; choose another directory")
    directory = claim_directory(output_dir, name="demo")
    sft = directory / "sft"
    _run_stage(scripts / "step1_sft" / "main.py", SFT_OPTIONS | {"output_dir": sft})
    say_once("judging held-out answers by the rule ...")
    rows = _sft_rows(sft)
    for line in table(["SFT, held-out test rows", "before", "after"], rows):
        say_once(line)
    say_once(f"\nadapter: {sft / 'adapter'}   metrics: {sft / 'metrics.jsonl'}")


def _run_stage(script: Path, options: dict[str, Any]) -> None:
    held_out = {"eval_data_path": BUNDLED_DATA["test"]}
    flags = [
        text for name, value in (options | held_out).items() for text in (f"--{name}", str(value))
    ]
    command = [str(Path(sys.executable).with_name("deepspeed")), str(script), *flags]
    say_once("$ " + " ".join(["deepspeed", *command[1:]]))
    result = subprocess.run(command, check=False)
    if result.returncode != 0:
        fail(f"{script} ended with exit code {result.returncode}")


def _sft_rows(directory: Path) -> list[list[str]]:
    """Perplexity and rule scores of the base and of the base with the run's adapter."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evals = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    before, after = rule_scores(directory)
    perplexity = [f"{evals[i]['perplexity']:.3f}" for i in (0, -1)]
    names = {
        "score": "rule score: right, polite, ends",
        "correct": "right",
        "polite": "polite",
        "ends": "ends",
    }
    shares = [[label, f"{before[key]:.3f}", f"{after[key]:.3f}"] for key, label in names.items()]
    return [["perplexity", *perplexity], *shares]


def rule_scores(directory: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of greedy test answers that pass the rule, without and with the adapter there."""
    source = find_model(str(directory))
    config = ModelConfig()
    tokenizer = load_tokenizer(source.tokenizer, config)
    model = build_causal_lm(
        source, tokenizer, config, LoraConfig(), dtype=torch.float32, seed=0, meta=False
    ).model.eval()
    with adapters_disabled(model):
        before = _score(model, tokenizer)
    return before, _score(model, tokenizer)


def _score(model: Any, tokenizer: Any) -> dict[str, float]:
    rows = BUNDLED_DATA["test"].read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(row)["prompt"] for row in rows]
    sums: dict[str, float] = defaultdict(float)
    for first in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[first : first + BATCH_SIZE]
        ids = tokenizer(batch)["input_ids"]
        answers = answer(
            model, tokenizer, ids, max_new_tokens=MAX_NEW_TOKENS, device=torch.device("cpu")
        )
        for prompt, tokens in zip(batch, answers, strict=True):
            ended = tokens[-1] == tokenizer.eos_token_id
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            verdict = judge(prompt, text, ended)
            for key in ("score", "correct", "polite", "ends"):
                sums[key] += float(getattr(verdict, key))
    return {key: total / len(prompts) for key, total in sums.items()}
