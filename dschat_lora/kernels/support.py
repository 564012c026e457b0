"""Operators whose kernels on a GPU are written in Triton."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any

import torch

_LIBRARY = torch.library.Library("dschat_lora", "DEF")
ON_CPU = False  # run kernels on a CPU too, by Triton's interpreter, as their tests do
PLAIN_ON_CPU = False  # take operators there as on a GPU, and compute them by torch

OFF = False  # run none in this process, where one was seen to fail


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels in Triton run on ``device``: NVIDIA's of compute capability 8 or more."""
    if OFF:
        return False
    if device.type != "cuda":
        return PLAIN_ON_CPU or (ON_CPU and _has_triton())
    capable = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return capable and _has_triton()


def errors(device: torch.device) -> tuple[type[Exception], ...]:
    """What is raised where a kernel cannot be compiled or launched there, beside RuntimeError."""
    if not (runs_kernels(device) and _has_triton()):
        return ()
    from triton.errors import TritonError

    return TritonError, OSError, SubprocessError, AssertionError  # the last without libcuda.so.1


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least ``number``, 1 for none."""
    return 1 << max(0, number - 1).bit_length()


def define(
    schema: str, kernel: Callable[..., Any], *, plain: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """A new operator ``torch.ops.dschat_lora.NAME``, without a derivative.

    Args:
        schema: name, arguments and results, such as ``swiglu(Tensor gate, Tensor up) -> Tensor``;
            one that writes into an argument marks it, ``Tensor(a!) out``.
        kernel: launches one kernel on a GPU.
        plain: computes the same by torch on a CPU, where :data:`ON_CPU` is not set.
        fake: makes results of the right shapes and types, without values.
    """

    def on_cpu(*args: Any) -> Any:
        return (kernel if ON_CPU else plain)(*args)

    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CUDA")
    _LIBRARY.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"dschat_lora::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.dschat_lora, name).default
