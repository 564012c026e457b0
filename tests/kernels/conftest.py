"""Has the tests of kernels run on a GPU too: see tests/gpu/test_kernels_gpu.py."""

import os

import pytest
import torch
from torch.utils._pytree import tree_map_only

from dschat_lora.kernels import support


class OnCopies:
    """A launch on copies of its arguments on a device; what it wrote is copied back."""

    def __init__(self, kernel, device):
        self._kernel, self._device = kernel, torch.device(device)

    def __call__(self, *args):
        storages = {}

        def move(x):
            own = x.untyped_storage()
            if own.data_ptr() not in storages:
                copy = torch.UntypedStorage(own.nbytes(), device=self._device)
                storages[own.data_ptr()] = own, copy.copy_(own)
            there = storages[own.data_ptr()][1]
            empty = torch.empty(0, dtype=x.dtype, device=self._device)
            return empty.set_(there, x.storage_offset(), x.shape, x.stride())

        result = self._kernel(*tree_map_only(torch.Tensor, move, args))
        for own, there in storages.values():
            own.copy_(there)
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, result)


def define(name, kernel, *, define=support.define, **options):
    """An operator of the package whose launches, in tests on a CPU, are on copies."""
    return define(name, OnCopies(kernel, os.environ["DSCHAT_LORA_KERNELS"]), **options)


if "DSCHAT_LORA_KERNELS" in os.environ:
    support.define = define


@pytest.fixture(params=[False, True], ids=["plain", "kernel"])
def by_kernel(request, monkeypatch):
    """Once by torch, and once by Triton's interpreter."""
    monkeypatch.setattr(support, "ON_CPU", request.param)
    return request.param


@pytest.fixture
def interpreted(monkeypatch):
    """By Triton's interpreter."""
    monkeypatch.setattr(support, "ON_CPU", True)
