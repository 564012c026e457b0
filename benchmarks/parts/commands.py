"""Whole runs of the commands that train on the bundled model: what no other part passes through."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common.report import PartReport, print_table

TRAINING = Path(__file__).parents[2] / "training"
STEP1, NLG = TRAINING / "step1_sft" / "main.py", TRAINING / "nlg_gpt2" / "main.py"
COMMON = ("--max_steps", "4", "--per_device_train_batch_size", "8", "--sample_generations", "1")
ADAPTERS = ("--lora_dim", "16")
CASES = {
    "ZeRO 3, offload, recomputing, merge": (
        STEP1,
        *("--zero_stage", "3", "--offload", "--gradient_checkpointing", "--merge_adapter"),
        *ADAPTERS,
    ),
    "all weights, ZeRO 2": (STEP1, "--zero_stage", "2", "--learning_rate", "1e-4"),
    "adapters beside a trained base, ZeRO 3": (
        STEP1,
        *("--zero_stage", "3", "--no-only_optimize_lora"),
        *ADAPTERS,
    ),
    "smoothed labels, the original's AdamW, ZeRO 1": (
        NLG,
        *("--zero_stage", "1", "--learning_rate", "2e-3", "--label_smooth", "0.1"),
        *("--no-correct_bias", "--decay_after_update", "--lora_dim", "16"),
    ),
}


def run(report: PartReport, *, tiny: bool) -> None:
    """Run each case as a user would; store, print and check. The model is tiny in any case."""
    del tiny
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, (script, *options) in CASES.items():
            results.append(_run(name, script, options, Path(directory) / str(len(results))))
            report.store({"commands": results})
    columns = ("case", "exit_code", "perplexity", "seconds")
    print_table(list(columns), [[result[column] for column in columns] for result in results])
    for result in results:
        report.check(f"{result['case']}: ends well", result["exit_code"] == 0)
        before, after = result["perplexity"] or (0.0, float("inf"))
        report.check(f"{result['case']}: learns", after < before)


def _run(
    name: str, script: str | Path, options: list[str | Path], output: Path
) -> dict[str, object]:
    start = time.monotonic()
    command = [sys.executable, script, "--output_dir", output, *COMMON, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    perplexity = None
    if result.returncode == 0:
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        evals = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
        perplexity = [round(evals[i]["perplexity"], 4) for i in (0, -1)]
    else:
        print(result.stderr[-2000:])
    return {
        "case": name,
        "exit_code": result.returncode,
        "perplexity": perplexity,
        "seconds": round(time.monotonic() - start, 1),
    }
