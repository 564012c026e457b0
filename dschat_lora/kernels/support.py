"""Operators whose kernels on a GPU are written in Triton."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
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
    name: str,
    kernel: Callable[P, R],
    *,
    plain: Callable[P, R],
    writes: Sequence[str] = (),
    fake: Callable[P, R] | None = None,
) -> Callable[P, R]:
    """A new operator ``torch.ops.dschat_lora.NAME``, without a derivative.

    Args:
        name: of the operator.
        kernel: launches one kernel on a GPU.
        plain: computes the same by torch on a CPU, where :data:`ON_CPU` is not set. The operator
            has its arguments.
        writes: names of arguments that it writes into.
        fake: makes results of the right shapes and types, without values; where ``plain`` cannot.
    """

    def on_cpu(*args: P.args, **options: P.kwargs) -> R:
        return (kernel if ON_CPU else plain)(*args, **options)

    schema = name + torch.library.infer_schema(plain, mutates_args=writes)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CUDA")
    _LIBRARY.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"dschat_lora::{name}", fake or plain, lib=_LIBRARY)
    operator: Callable[P, R] = getattr(torch.ops.dschat_lora, name).default
    return operator
