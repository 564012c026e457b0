"""Compares passes of training as CUDA graphs with those that are launched on a GPU, as JSON."""

import json
import sys
import time
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.blocks import recompute_blocks
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.models.cuda_graphs import cuda_graphs
from dschat_lora.models.training_graphs import TrainingGraphs
from helpers.tiny import ragged_samples

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "initializer_range": 0.05,
}
CUDA = torch.device("cuda")
STEPS, MICRO = 12, 2  # optimizer steps, and micro-batches of each


def batches():
    """Four micro-batches of unlike lengths, again and again: all are recorded in four steps."""
    samples = ragged_samples(32, longest=120, seed=1)
    rows = [samples[i : i + 2] for i in range(0, len(samples), 2)]
    collate = SampleCollator(0)
    four = [collate(rows[i : i + 4]).to(CUDA) for i in range(0, len(rows), 4)]
    return four * (STEPS * MICRO // 4)


def train(dtype, given, *, graphs=False, recompute=False):
    """Losses of all micro-batches, the factors in the end, and seconds of the last half."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(CUDA, dtype).requires_grad_(False)
    apply_lora(model, LoraConfig(lora_dim=8), seed=0)
    if recompute:
        recompute_blocks(model)
    network = CausalLMLoss(model).train()
    trained = [p for p in network.parameters() if p.requires_grad]
    if graphs:
        network.backbone.graphs = TrainingGraphs(model.base_model, cuda_graphs())
    optimizer, casts = torch.optim.AdamW(trained, lr=1e-3, fused=True), FactorCasts(network)
    losses, started = [], 0.0
    for step in range(STEPS):
        if step == STEPS // 2:
            torch.cuda.synchronize()
            started = time.perf_counter()
        with casts.in_use():
            for batch in given[step * MICRO : (step + 1) * MICRO]:
                loss = network(
                    batch.input_ids,
                    batch.position_ids,
                    batch.segment_ids,
                    batch.logit_positions,
                    batch.target_ids,
                    batch.spans,
                ) / len(batch.target_ids)
                loss.backward()
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    passes = len(network.backbone.graphs._passes) if graphs else 0
    values = torch.cat([torch.stack(losses).float(), *(p.detach().flatten() for p in trained)])
    return values, seconds, passes


def main():
    given, result = batches(), {"warned": []}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exact, *_ = train(torch.float32, given)
        for name, options in (("kept", {}), ("recomputed", {"recompute": True})):
            plain, launched, _ = train(torch.bfloat16, given, **options)
            replayed, seconds, passes = train(torch.bfloat16, given, graphs=True, **options)
            result[name] = {
                "launched": float((plain - exact).norm() / exact.norm()),
                "replayed": float((replayed - exact).norm() / exact.norm()),
                "apart": float((replayed - plain).norm() / exact.norm()),
                "seconds": [launched, seconds],
                "passes": passes,
            }
        result["warned"] = [
            str(each.message) for each in told if "CUDA graphs" in str(each.message)
        ]
    sys.stdout.write(json.dumps(result))


main()
