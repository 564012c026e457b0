"""Whole commands of step 1 and of PPO as they are typed, r = 128 on one GPU, on random weights.

What is stored are the lines that the runs themselves write to metrics.jsonl.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.ppo_task import FULL, IterationSize, PpoTask, write_task
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import opt_shape
from benchmarks.contenders.common import leave_group
from dschat_lora.engine.build import resolve_dtype
from dschat_lora.engine.distributed import device

TRAINING = Path(__file__).parents[2] / "training"
ACTORS = {
    "1.3b": opt_shape(2048, 24, 32, 50272, 128),
    "6.7b": opt_shape(4096, 32, 32, 50272, 128),
}
# OPT-350M's layers: what DeepSpeed-Chat's scripts take.
CRITIC = opt_shape(1024, 24, 16, 50272, 128)
TINY = opt_shape(32, 2, 4, 64, 4)
# Seconds in which no run has written its last line: the part would be stopped.
SECONDS = 100.0
FIGURES = (
    *("tokens_per_second", "tflops_per_device", "tflops_deepspeed_chat", "mfu"),
    *("step_seconds", "peak_memory_bytes"),
)
PHASES = ("generation_seconds", "scoring_seconds", "training_seconds")


def run(report: PartReport, *, tiny: bool, name: str) -> None:
    """Run the stage of ``name``, such as ``sft-1.3b``; store, print and check."""
    stage, _, parameters = name.partition("-")
    actor = TINY if tiny else ACTORS[parameters]
    critic = (TINY if tiny else CRITIC) if stage == "ppo" else None
    amount = (8, 8, 8, 8) if tiny else (256, 256, 64, 16)
    size = IterationSize(actor, critic, *amount, (FULL,), 3, SECONDS)
    dtype = "fp32" if tiny else resolve_dtype("auto")
    with tempfile.TemporaryDirectory() as directory:
        task = write_task(Path(directory), size, dtype=dtype, threads=1, device=device())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        command = (_sft if stage == "sft" else _ppo)(task, tiny=tiny)
        typed = (
            " ".join(command[1:]).replace(directory, "DIRECTORY").replace(str(TRAINING), "training")
        )
        report.store({"size": asdict(size), "dtype": dtype, "command": typed})
        result = _watch(command, Path(directory) / "output")
    names = [*FIGURES, *(PHASES if stage == "ppo" else ())]
    # The first step warms up.
    lines = result["lines"][1:] or result["lines"]
    known = {n: [line[n] for line in lines if line.get(n) is not None] for n in names}
    figures = {n: median(values) for n, values in known.items() if values}
    report.store({"exit_code": result["exit_code"], "steps": len(lines), "figures": figures})
    print(typed)
    if figures:
        print_table(list(figures), [list(figures.values())])
    if result["exit_code"]:
        print(result["errors"][-2000:])
    report.check("steps were made, to the end or until time was up", bool(lines))


def _sft(task: PpoTask, *, tiny: bool) -> list[str]:
    rows = Path(task.path("sft.jsonl"))
    count = 64 if tiny else 2048
    texts = [
        json.dumps({"prompt": each["prompt"], "completion": each["prompt"]}) for each in _rows(task)
    ]
    rows.write_text("\n".join((texts * (count // len(texts) + 1))[:count]) + "\n", "utf-8")
    options = {
        "model_name_or_path": task.path("actor"),
        "data_path": str(rows),
        "lora_dim": str(task.size.actor.lora_dim),
        "gradient_accumulation_steps": "8",
        "max_seq_len": "32" if tiny else "512",
        "max_steps": "4",
        "sample_generations": "0",
        "eval_ratio": "0",
    }
    return _command(task, "step1_sft", options)


def _rows(task: PpoTask) -> list[dict[str, str]]:
    lines = Path(task.path("prompts.jsonl")).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _ppo(task: PpoTask, *, tiny: bool) -> list[str]:
    size = task.size
    options = {
        "actor_model_name_or_path": task.path("sft"),
        "critic_model_name_or_path": task.path("reward"),
        "data_path": task.path("prompts.jsonl"),
        "max_prompt_seq_len": str(size.max_prompt),
        "max_answer_seq_len": str(size.max_answer),
        "per_device_generation_batch_size": str(size.responses),
        "per_device_training_batch_size": str(size.chat_micro),
        "gradient_accumulation_steps": str(size.responses // size.chat_micro),
        "max_steps": "3",
        "eval_prompts": "0",
        "eval_ratio": "0",
    }
    return _command(task, "step3_rlhf", options)


def _command(task: PpoTask, stage: str, options: dict[str, str]) -> list[str]:
    options |= {"output_dir": task.path("output"), "data_output_path": task.path("cache")}
    options["dtype"] = task.dtype
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, str(TRAINING / stage / "main.py"), *words]


def _watch(command: list[str], output: Path) -> dict[str, Any]:
    """Run a command to its end, or until it has taken too long; its train lines so far."""
    leave_group()
    begun = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        errors = process.communicate(timeout=SECONDS)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        errors = process.communicate()[1]
    metrics = output / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    train = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    seconds = time.monotonic() - begun
    return {"exit_code": process.returncode, "errors": errors, "lines": train, "seconds": seconds}
