"""Attention of one call a layer against a dense mask on this GPU: relative errors as JSON."""

import json
import sys

import torch

from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.models.backbone import Backbone
from helpers.pairs import ragged_pairs
from helpers.tiny import ragged_samples, tiny_model

GPU = torch.device("cuda")


def batches():
    samples = ragged_samples(9, longest=20)
    pairs = [each.sample() for each in ragged_pairs(6, longest=14)]
    yield SampleCollator(0)([samples[:4], samples[4:]])
    yield PairCollator(0, "shared")([pairs[:3], pairs[3:]])


def run(kind, dtype, *, by_spans, checkpointing):
    """Loss, and the gradients of all weights in one vector."""
    model = tiny_model(kind).to(GPU, dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    backbone = Backbone(model)
    if not by_spans:
        backbone.by_spans = False
    skips = backbone.skips_padding(GPU)
    total = 0.0
    for batch in batches():
        moved = batch.to(GPU)
        inputs = moved.input_ids, moved.position_ids, moved.segment_ids
        branches = getattr(moved, "branch_ids", None)
        hidden = backbone(*inputs, branches, moved.spans)
        if by_spans:
            # What is read back from the device would be an error here.
            torch.cuda.set_sync_debug_mode("error")
            backbone(*inputs, branches, moved.spans)
            torch.cuda.set_sync_debug_mode("default")
        real = hidden[moved.segment_ids > 0].float()
        weights = torch.randn(real.shape, generator=torch.Generator().manual_seed(3))
        total = total + (real * weights.to(GPU)).sum() / len(real)
    total.backward()
    parts = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return skips, total.detach(), torch.cat(parts)


def error(value, reference):
    return float((value - reference).norm() / reference.norm())


def main():
    results = []
    for kind in ("opt", "neox", "llama", "qwen2"):
        for dtype in (torch.bfloat16, torch.float16):
            for checkpointing in (False, True):
                options = {"checkpointing": checkpointing}
                skips, loss, gradient = run(kind, dtype, by_spans=True, **options)
                _, dense_loss, dense = run(kind, dtype, by_spans=False, **options)
                _, exact_loss, exact = run(kind, torch.float32, by_spans=False, **options)
                entry = {
                    "case": f"{kind} {dtype} {checkpointing}",
                    "skips_padding": skips,
                    "loss": error(loss, exact_loss),
                    "dense_loss": error(dense_loss, exact_loss),
                    "gradient": error(gradient, exact),
                    "dense_gradient": error(dense, exact),
                }
                results.append(entry)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
