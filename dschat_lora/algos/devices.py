"""Copies from the host to a device that nobody waits for."""

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
