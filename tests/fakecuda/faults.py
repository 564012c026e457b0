"""Training and decoding with a fault in the forward pass; see test_planted_faults."""

from contextlib import suppress
from dataclasses import replace
from unittest import mock

import torch

from benchmarks.common import shapes
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.models.cuda_graphs import cuda_graphs
from fakecuda import programs
from fakecuda.device import fake_cuda

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


def decode_around_a_failed_capture():
    """(graphs, replays, graphs that are held) of a call before it and one after, then a draw."""
    with fake_cuda() as watch:
        watch.truth, texts = False, []  # no sequence ends
        size = replace(shapes.SHAPES["opt-1.3b"], num_layers=1)
        model = shapes.random_model(size, dtype=torch.bfloat16, device=torch.device("cuda")).eval()
        decoder = Decoder(model, eos_ids=[2], pad_id=1, device=torch.device("cuda"))
        for _ in range(2):
            watch.start()
            decoder([[5] * 60], Sampling(8), seeds=[[0]])
            texts.append([len(watch.graphs), watch.replays, sum(watch.pools.values())])
            with suppress(RuntimeError):
                cuda_graphs()(torch.cuda.synchronize)
        torch.zeros(4, device="cuda").bernoulli_()
        return texts


def decode_with(fault, new_tokens):
    """A call of each of two decoders, with the fault in every normalisation; "none" for without."""
    forward = globals().get(fault.replace(" ", "_"), NORM)
    with mock.patch.object(torch.nn.LayerNorm, "forward", forward):
        options = {"layers": 1, "length": 60, "new_tokens": new_tokens}
        return programs.decode("opt-1.3b", **options, anew=True)
