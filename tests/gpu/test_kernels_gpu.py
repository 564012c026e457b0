"""Kernels in Triton on a GPU give what their tests expect of them by its interpreter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1] / "kernels"


def run_on(device, environment):
    # Without the conftest that hides GPUs.
    command = [sys.executable, "-m", "pytest", "-q", "--confcutdir", KERNELS, KERNELS]
    files = ("test_support.py", "test_compiling.py")
    left_out = [word for name in files for word in ("--ignore", KERNELS / name)]
    return subprocess.run(
        [*command, *left_out],
        env=environment
        | {
            "DSCHAT_LORA_KERNELS": device,
            "PYTHONPATH": os.pathsep.join([str(KERNELS.parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
def test_kernels_run_on_copies_of_what_their_tests_give_them():
    result = run_on("cpu", os.environ)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU")
def test_kernels_on_a_gpu_pass_the_tests_of_those_on_a_cpu(gpu_environment):
    result = run_on("cuda", gpu_environment)
    assert result.returncode == 0, result.stdout[-3000:]
