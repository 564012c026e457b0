"""Fused kernels, and steps replayed for requests, on a real GPU: ``pytest -m gpu``."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU"),
]


def test_fused_kernels_round_no_more_and_replayed_steps_are_those_as_they_are(gpu_environment):
    environment = gpu_environment | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    script = [sys.executable, str(HERE / "fused_main.py")]
    result = subprocess.run(script, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(result.stdout)
    assert max(results["fp32"]) < 1e-5
    assert results["steps"] < 1e-5
    assert max(results["decoding"]) < 1e-4, "of OPT, Llama, Qwen2 and Qwen3"
    for fused, plain in zip(results["bf16"], results["bf16 as it is"], strict=True):
        assert fused < 1.1 * plain
    assert results["adapters"]["together"] < 1.1 * results["adapters"]["plain"]
