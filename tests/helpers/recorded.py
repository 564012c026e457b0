"""Passes of training that are recorded and replayed on a CPU."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from dschat_lora.models import attention, backbone, training_graphs
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.training_graphs import TrainingGraphs
from helpers.tape import Tape


@contextmanager
def recordable():
    """Within, this device attends as a GPU does, and small micro-batches have several shapes."""
    sizes = {"_FEWEST_TOKENS": 8, "_FEWEST_SEQUENCES": 2, "_SHORTEST": 4}
    with ExitStack() as stack:

        def replace(module, name, value):
            stack.enter_context(mock.patch.object(module, name, value))

        for module in (attention, backbone):
            replace(module, "has_varlen", lambda device, dtype: True)
        replace(attention, "kernel", lambda: masked_attention)
        for name, value in sizes.items():
            replace(training_graphs, name, value)
        yield


class Recorder:
    """Records on a CPU; the tapes that it made."""

    def __init__(self):
        self.tapes = []

    def __call__(self, step):
        self.tapes.append(Tape(step))
        return self.tapes[-1]


def record(*networks, by=None):
    """Have every model that trains recorded; what records each, ``by`` or a recorder of its own."""
    made = []
    for network in networks:
        for each in network.modules():
            trains = isinstance(each, BackboneModel) and any(
                p.requires_grad for p in each.model.base_model.parameters()
            )
            if trains:
                made.append(by or Recorder())
                each.backbone.graphs = TrainingGraphs(each.model.base_model, made[-1])
    return made


def masked_attention(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """torch's ``varlen_attn``, which reads ends on the device alone, as a graph records it.

    NaN where a sequence is longer than is said, and where a token is of none.
    """
    queries, keys = torch.arange(len(query)), torch.arange(len(key))
    of_query, of_key = (
        torch.searchsorted(ends[1:].long(), places, right=True)
        for ends, places in ((cu_seq_q, queries), (cu_seq_k, keys))
    )
    known = of_query.clamp(max=len(cu_seq_q) - 2)
    # the last query stands where the last key does
    place = cu_seq_k[1:][known] - cu_seq_q[1:][known] + queries
    seen = (of_query[:, None] == of_key) & (keys <= place[:, None]) & (known == of_query)[:, None]
    if window_size[0] >= 0:
        seen &= keys >= place[:, None] - window_size[0]
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * torch.einsum("qhd,khd->hqk", query, key)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    fits = (cu_seq_q.diff() <= max_q).all() & (cu_seq_k.diff() <= max_k).all()
    return torch.einsum("hqk,khd->qhd", weights, value) + torch.where(fits, 0.0, torch.nan)
