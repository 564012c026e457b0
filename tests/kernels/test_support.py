"""Operators of the package: by torch on a CPU, by their kernel where it is asked for."""

import warnings
from subprocess import CalledProcessError

import pytest
import torch

from dschat_lora.kernels import norms, support
from dschat_lora.kernels.trial import try_kernels

CPU = torch.device("cpu")


def test_an_operator_is_plain_on_a_cpu_runs_its_kernel_on_demand_and_has_shapes_alone(monkeypatch):
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    twice = support.define("test_twice", lambda x: x + x + 1, plain=double)
    x = torch.tensor([1.0, 2.0])
    assert twice(x).tolist() == [2, 4]
    assert not support.runs_kernels(x.device)
    monkeypatch.setattr(support, "ON_CPU", True)
    assert support.runs_kernels(x.device)
    assert twice(x).tolist() == [3, 5]
    assert twice(torch.empty(3, device="meta")).shape == (3,)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        CalledProcessError(1, "gcc"),
        AssertionError("libcuda.so cannot found!"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_without_a_compiler_no_kernel_runs_and_a_warning_says_why(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(support, "ON_CPU", True)
    monkeypatch.setattr(support, "OFF", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try_kernels(CPU)
    assert support.runs_kernels(CPU)
    monkeypatch.setattr(norms, "rms_norm_rows", fail)
    with pytest.warns(UserWarning, match=f"without kernels in Triton.*{type(error).__name__}"):
        try_kernels(CPU)
    assert not support.runs_kernels(CPU)
    try_kernels(CPU)  # which is not told again
