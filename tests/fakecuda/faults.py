"""Training steps with a fault in the forward pass of every adapter; see test_planted_faults."""

from unittest import mock

import torch

from dschat_lora.lora.layers import LoraLinear
from fakecuda import programs

PLAIN = LoraLinear.forward
KEPT = []


def host_tensor(layer, x):
    return PLAIN(layer, x) + torch.ones(layer.out_features, dtype=x.dtype)


def item(layer, x):
    return PLAIN(layer, x) * x.flatten()[0].item()


def mask(layer, x):
    y = PLAIN(layer, x)
    return y + 0 * y[y > 0].sum()


def unpinned(layer, x):
    return PLAIN(layer, x) + torch.zeros(1, dtype=x.dtype).to(x.device, non_blocking=True)


def fp32(layer, x):
    return PLAIN(layer, x.float()).to(x.dtype)


def doubled_buffer(layer, x):
    KEPT.append(torch.empty_like(layer.weight))
    return PLAIN(layer, x)


def train_with(fault):
    """As :func:`fakecuda.programs.train` on a small step, with the fault; "none" for without."""
    forward = globals().get(fault.replace(" ", "_"), PLAIN)
    with mock.patch.object(LoraLinear, "forward", forward):
        return programs.train("opt-1.3b", layers=2, rows=4)
