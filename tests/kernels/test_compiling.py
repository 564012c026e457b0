"""What Triton makes of the package's kernels without an interpreter, and without a GPU."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dschat_lora.kernels

KERNELS = sorted(Path(*dschat_lora.kernels.__path__).glob("*_kernels.py"))


def test_kernels_have_no_annotations_but_triton_s_own():
    """Its compiler takes a type of Python for a variable that it may not read."""
    wrong = [
        f"{path.name}: {node.name}({each.arg})"
        for path in KERNELS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for each in node.args.args
        if each.annotation is not None and ast.unparse(each.annotation) != "tl.constexpr"
    ]
    assert KERNELS
    assert wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_kernel_compiles_for_gpus(capability):
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), capability]
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    compiled = {line.split()[0] for line in run.stdout.splitlines()}
    trees = [ast.parse(path.read_text()) for path in KERNELS]
    functions = {each.name for tree in trees for each in tree.body if hasattr(each, "name")}
    calls = [each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Call)]
    helpers = {each.func.id for each in calls if isinstance(each.func, ast.Name)}
    assert compiled >= functions - helpers
