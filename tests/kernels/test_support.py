"""Operators of the package: by torch on a CPU, by their kernel where it is asked for."""

import torch

from dschat_lora.kernels import support


def test_an_operator_is_plain_on_a_cpu_runs_its_kernel_on_demand_and_has_shapes_alone(monkeypatch):
    twice = support.define(
        "test_twice(Tensor x) -> Tensor",
        lambda x: x + x + 1,
        plain=lambda x: x + x,
        fake=torch.empty_like,
    )
    x = torch.tensor([1.0, 2.0])
    assert twice(x).tolist() == [2, 4]
    assert not support.runs_kernels(x.device)
    monkeypatch.setattr(support, "ON_CPU", True)
    assert support.runs_kernels(x.device)
    assert twice(x).tolist() == [3, 5]
    assert twice(torch.empty(3, device="meta")).shape == (3,)
