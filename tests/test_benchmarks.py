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
README = ROOT / "benchmarks" / "README.md"
PARTS = (
    "env",
    "trajectories",
    "scaling",
    "reload",
    "saving",
    "commands",
    "pairs",
    "decode",
    "ppo",
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


@pytest.mark.stage
def test_the_ppo_part_finds_both_ways_to_do_the_same_work(tmp_path):
    result = run("ppo", output=tmp_path)
    assert result.returncode == 0, result.stderr
    entry = json.loads((tmp_path / "cpu-tiny.json").read_text())["ppo"]
    assert entry["status"] == "passed"
    assert entry["checks"]["both find the same within 0.0001"]
    assert all(entry["checks"].values())
    assert len(entry["apart"]) == 10
    assert max(entry["apart"].values()) <= 1e-4
    cases = {(case["setting"], case["contender"]): case for case in entry["cases"]}
    assert {setting for setting, _ in cases} == set(entry["mean_tokens"])
    for (setting, contender), case in cases.items():
        means = entry["mean_tokens"][setting]
        assert case["generated"] == pytest.approx(means["answer"] * entry["size"]["responses"])
        for work in case["works"]:
            assert set(work["seconds"]) == {"generation", "scoring", "training", "rest"}
            assert all(seconds > 0 for seconds in work["seconds"].values())
        if contender == "ours":
            assert case["times_ours"]["median"] == 1
            # the package holds each base once
            chat = cases[setting, "DeepSpeed-Chat's way"]
            assert case["weights_mib"] < 0.7 * chat["weights_mib"]


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


def limits_of_all_parts():
    result = run(python="/bin/false")
    limits = re.findall(r"== (\S+) \(at most (\d+) s\)", result.stdout)
    return {part: int(limit) for part, limit in limits}


def test_all_parts_run_by_default_each_within_110_seconds():
    limits = limits_of_all_parts()
    assert tuple(limits) == PARTS
    assert max(limits.values()) <= 110


def test_each_documented_group_of_parts_ends_within_ten_minutes_even_if_all_have_to_be_killed():
    limits = limits_of_all_parts()
    lines = re.findall(r"^benchmarks/gpu\.sh (.+?) +# group", README.read_text(), re.MULTILINE)
    groups = [line.split() for line in lines]
    assert len(groups) == 2
    assert tuple(part for group in groups for part in group) == PARTS
    for group in groups:
        assert sum(limits[part] + 5 for part in group) <= 10 * 60


def test_the_documentation_gives_the_limits_that_hold():
    limits = limits_of_all_parts()
    text = README.read_text()
    table = re.findall(r"^\| `(\S+)` \| (\d+) s \|", text, re.MULTILINE)
    assert [(part, int(limit)) for part, limit in table] == list(limits.items())
    # with five seconds more for each to be killed in
    minutes = math.ceil(sum(limit + 5 for limit in limits.values()) / 60)
    assert f"every part, {minutes} minutes at most" in text


def test_the_stored_result_is_of_a_whole_cpu_run():
    text = (ROOT / "benchmarks" / "results" / "cpu-tiny.json").read_text()
    entries = json.loads(text)
    assert set(entries) == set(PARTS)
    assert {entry["status"] for entry in entries.values()} == {"passed"}
    assert not re.search(r"(?<![\w.])/\w", text), "a path of the machine it ran on"
