"""Training and decoding with a fault in the forward pass; see test_planted_faults."""

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


NORM = torch.nn.LayerNorm.forward


def seen_wait(layer, x):
    return NORM(layer, x) * x.flatten()[0].item()


def unseen_wait(layer, x):
    torch.cuda.synchronize()
    return NORM(layer, x)


def wrong(layer, x):
    if x.shape[1] == 1 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a model that minds captures")
    return NORM(layer, x)


def decode_with(fault, new_tokens):
    """A call of each of two decoders, with the fault in every normalisation; "none" for without."""
    forward = globals().get(fault.replace(" ", "_"), NORM)
    with mock.patch.object(torch.nn.LayerNorm, "forward", forward):
        options = {"layers": 1, "length": 60, "new_tokens": new_tokens}
        return programs.decode("opt-1.3b", **options, anew=True)
