"""What only a GPU shows: ``pytest -m gpu`` on a machine that has one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"
PARTS = ("env", "optimizer", "ragged")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU"),
]


def test_checks_of_the_gpu_script_hold_on_this_gpu(tmp_path, gpu_environment):
    environment = gpu_environment | {"PYTHON": sys.executable, "BENCH_OUTPUT": str(tmp_path)}
    result = subprocess.run([str(SCRIPT), *PARTS], env=environment, check=False)
    assert result.returncode == 0
    (stored,) = tmp_path.glob("*.json")
    assert not stored.name.startswith("cpu")
    assert {entry["status"] for entry in json.loads(stored.read_text()).values()} == {"passed"}
