"""Results that are read late on a real GPU: ``pytest -m gpu`` on a machine that has one."""

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU"),
]


def test_results_that_are_read_late_are_those_of_their_step(gpu_environment):
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    script = [sys.executable, str(HERE / "late_main.py")]
    environment = gpu_environment | {"PYTHONPATH": path}
    result = subprocess.run(script, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    results = json.loads(result.stdout.splitlines()[-1])
    assert len(results["late"]) == len(results["in time"]) == 12
    for late, in_time in zip(results["late"], results["in time"], strict=True):
        assert late == pytest.approx(in_time, rel=1e-5)
    losses = [loss for loss, _ in results["in time"]]
    assert min(abs(a - b) for a, b in pairwise(losses)) > 1e-4
