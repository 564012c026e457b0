"""Whole runs of the stage's command on the bundled model: what no other part passes through."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.parts.report import PartReport, print_table

SCRIPT = Path(__file__).parents[2] / "training" / "step1_sft" / "main.py"
COMMON = ("--max_steps", "4", "--per_device_train_batch_size", "8", "--sample_generations", "1")
ADAPTERS = ("--lora_dim", "16")
CASES = {
    "ZeRO 3, offload, recomputing, merge": (
        *("--zero_stage", "3", "--offload", "--gradient_checkpointing", "--merge_adapter"),
        *ADAPTERS,
    ),
    "all weights, ZeRO 2": ("--zero_stage", "2", "--learning_rate", "1e-4"),
    "adapters beside a trained base, ZeRO 3": (
        *("--zero_stage", "3", "--no-only_optimize_lora"),
        *ADAPTERS,
    ),
}


def run(report: PartReport, *, tiny: bool) -> None:
    """Run each case as a user would; store, print and check. The model is tiny in any case."""
    del tiny
    results = []
    with tempfile.TemporaryDirectory() as directory:
        for name, options in CASES.items():
            results.append(_run(name, options, Path(directory) / str(len(results))))
            report.store({"commands": results})
    columns = ("case", "exit_code", "perplexity", "seconds")
    print_table(list(columns), [[result[column] for column in columns] for result in results])
    for result in results:
        report.check(f"{result['case']}: ends well", result["exit_code"] == 0)
        before, after = result["perplexity"] or (0.0, float("inf"))
        report.check(f"{result['case']}: learns", after < before)


def _run(name: str, options: tuple[str, ...], output: Path) -> dict[str, object]:
    start = time.monotonic()
    command = [sys.executable, str(SCRIPT), "--output_dir", str(output), *COMMON, *options]
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
