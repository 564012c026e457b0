"""benchmarks/gpu.sh runs to the end on a CPU, so that it works when a GPU is at hand."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
PARTS = (
    "env",
    "trajectories",
    "scaling",
    "reload",
    "saving",
    "commands",
    "pairs",
    "throughput-1.3b",
    "throughput-6.7b",
)


def run(*parts, python=sys.executable, output="/nonexistent"):
    environment = {
        **os.environ,
        "PYTHON": str(python),
        "BENCH_OUTPUT": str(output),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [str(SCRIPT), *parts], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.stage
def test_a_throughput_part_runs_to_the_end_on_a_cpu_and_stores_its_numbers(tmp_path):
    result = run("throughput-1.3b", output=tmp_path)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "cpu-tiny.json").read_text()
    entry = json.loads(text)["throughput-1.3b"]
    assert entry["status"] == "passed"
    assert all(entry["checks"].values())
    # Random weights know nothing: the loss is that of a uniform guess over the vocabulary.
    assert entry["loss"]["packed"] == pytest.approx(math.log(512), abs=0.05)
    cases = {(case["case"], case["zero_stage"]): case for case in entry["cases"]}
    assert set(cases) == {
        ("packed", 0),
        ("packed, recomputing", 0),
        ("equal lengths", 0),
        ("padded", 0),
        ("packed", 2),
    }
    for case in cases.values():
        assert case["problem"] is None
        assert case["tokens_per_second"] == pytest.approx(case["tokens"] / case["step_seconds"])
        # padding and recomputation only add to what the model needs
        assert case["hardware_tflops_per_device"] > case["tflops_per_device"] > 0
        assert case["mfu"] is None  # a CPU is in no table
        measured = entry["matmul_tflops"]["measured"]
        assert case["mfu_measured"] == pytest.approx(case["tflops_per_device"] / measured)
        assert case["tflops_deepspeed_chat"] > 0
        assert case["peak_memory_bytes"] > 0
    padded, packed = cases["padded", 0], cases["packed", 0]
    assert padded["tokens"] == packed["tokens"]
    assert padded["positions"] == padded["samples"] * 32
    assert socket.gethostname() not in text.replace('"device": "cpu"', "")
    assert str(ROOT) not in text
    assert not list(tmp_path.glob("*.partial"))


def test_an_unknown_part_is_refused_by_name_before_anything_runs():
    result = run("env", "thruput", python="/bin/false")
    assert result.returncode == 2
    assert "unknown part 'thruput'" in result.stderr
    assert all(part in result.stderr for part in PARTS)
    assert "== env" not in result.stdout


def test_a_part_that_fails_is_reported_and_the_others_still_run():
    result = run("env", "scaling", python="/bin/false")
    assert result.returncode == 1
    assert "== env" in result.stdout
    assert "== scaling" in result.stdout
    assert "failed: env scaling" in result.stdout


def test_all_parts_run_by_default_within_ten_minutes_even_if_each_has_to_be_killed():
    result = run(python="/bin/false")
    limits = dict(re.findall(r"== (\S+) \(at most (\d+) s\)", result.stdout))
    assert tuple(limits) == PARTS
    assert sum(int(limit) + 5 for limit in limits.values()) <= 10 * 60


def test_the_stored_result_is_of_a_whole_cpu_run():
    text = (ROOT / "benchmarks" / "results" / "cpu-tiny.json").read_text()
    entries = json.loads(text)
    assert set(entries) == set(PARTS)
    assert {entry["status"] for entry in entries.values()} == {"passed"}
    assert not re.search(r"(?<![\w.])/\w", text), "a path of the machine it ran on"
