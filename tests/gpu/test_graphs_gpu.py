"""Passes of training as CUDA graphs on a real GPU: ``pytest -m gpu``."""

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


def test_replayed_passes_train_as_launched_ones_do_and_take_less_time(gpu_environment):
    environment = gpu_environment | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    script = [sys.executable, str(HERE / "graphs_main.py")]
    result = subprocess.run(script, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(result.stdout)
    assert results["warned"] == []
    for name in ("kept", "recomputed"):
        of = results[name]
        assert of["passes"] >= 2
        # Both round to 16 bits, otherwise where padding changes the kernel of a product.
        assert of["replayed"] < 1.2 * of["launched"] + 1e-3
        launched, replayed = of["seconds"]
        assert replayed < 0.7 * launched, results
