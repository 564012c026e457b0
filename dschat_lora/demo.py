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
from dschat_lora.config import LoraConfig, ModelConfig, ScoreConfig
from dschat_lora.lora.model import adapters_disabled
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.causal_lm import load_tokenizer
from dschat_lora.models.generate import answer
from dschat_lora.models.source import find_model
from dschat_lora.report.directory import claim_directory, leftovers
from dschat_lora.report.tables import table
from dschat_lora.report.terminal import say_once
from dschat_lora.score import score_files
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
REWARD_OPTIONS = {
    "lora_learning_rate": 2e-3,
    "max_seq_len": 128,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 1,
    "num_warmup_steps": 10,
    "logging_steps": 25,
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
    if output_dir is not None and any(leftovers(Path(output_dir) / n) for n in ("sft", "reward")):
        fail(f"--output_dir {output_dir} holds an earlier demo; choose another directory")
    directory = claim_directory(output_dir, name="demo")
    sft, reward = directory / "sft", directory / "reward"
    _run_stage(scripts / "step1_sft" / "main.py", SFT_OPTIONS | {"output_dir": sft})
    start = {"model_name_or_path": sft, "output_dir": reward}
    _run_stage(scripts / "step2_reward" / "main.py", REWARD_OPTIONS | start)
    say_once("judging held-out answers by the rule, and the reward model on held-out pairs ...")
    tables = {
        "SFT, held-out test rows": _sft_rows(sft),
        "reward model, held-out test pairs": _reward_rows(reward),
    }
    for title, rows in tables.items():
        say_once("")
        for line in table([title, "before", "after"], rows):
            say_once(line)
    for stage in (sft, reward):
        say_once(f"\nadapter: {stage / 'adapter'}   metrics: {stage / 'metrics.jsonl'}")


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
    evals = _evaluations(directory)
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


def _evaluations(directory: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a stage."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "eval"]


def _reward_rows(directory: Path) -> list[list[str]]:
    """Accuracy on held-out pairs before and after training, and after it for each flaw."""
    evals = _evaluations(directory)
    accuracy = [f"{evals[i]['accuracy']:.3f}" for i in (0, -1)]
    after = accuracy_by_flaw(directory)
    return [
        ["accuracy", *accuracy],
        *([f"  rejected is {flaw}", "", f"{share:.3f}"] for flaw, share in after.items()),
    ]


def accuracy_by_flaw(directory: Path) -> dict[str, float]:
    """Share of test pairs that the reward model there ranks rightly, by what is wrong in them."""
    path = directory / "scores.jsonl"
    score_files(
        ScoreConfig(
            model_name_or_path=str(directory),
            data_path=(str(BUNDLED_DATA["test"]),),
            output_path=str(path),
            per_device_eval_batch_size=BATCH_SIZE,
        )
    )
    right: dict[str, list[bool]] = defaultdict(list)
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        right[row["flaw"]].append(row["chosen_score"] > row["rejected_score"])
    return {flaw: sum(each) / len(each) for flaw, each in sorted(right.items())}


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
