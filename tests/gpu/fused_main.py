"""Compares fused kernels and replayed steps with plain ones on a GPU, as JSON."""

import contextlib
import json
import sys
from itertools import chain

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_lora.config.groups import LoraConfig
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.lora.model import apply_lora, lora_layers
from dschat_lora.models.fused import fuse_kernels, keep_plain
from helpers.tiny import adapted, tiny_model

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "initializer_range": 0.2,
}


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).to("cuda", dtype).eval()


def values_of(model):
    ids = torch.arange(200, device="cuda").view(2, 100)
    model.zero_grad()
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    return output.logits.detach().float(), gradient


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def compare_values():
    exact, rounded, fused = values_of(llama()), values_of(llama(torch.bfloat16)), []
    for dtype in (torch.float32, torch.bfloat16):
        model = llama(dtype)
        fuse_kernels(model)
        fused.append(values_of(model))
    plain, *errors = [
        [error(value, of_fp32) for value, of_fp32 in zip(values, exact, strict=True)]
        for values in (rounded, *fused)
    ]
    return {"fp32": errors[0], "bf16": errors[1], "bf16 as it is": plain}


def compare_adapters():
    """Layers of one input together, and each by itself, against fp32."""
    values = {}
    for name, dtype, fused in (
        ("exact", torch.float32, False),
        ("plain", torch.bfloat16, False),
        ("together", torch.bfloat16, True),
    ):
        model = llama(dtype)
        apply_lora(model, LoraConfig(lora_dim=8), seed=0)
        model.enable_input_require_grads()
        for layer in lora_layers(model).values():
            torch.nn.init.constant_(layer.lora_B, 0.01)
        if fused:
            fuse_kernels(model)
        with FactorCasts(model).in_use() if fused else contextlib.nullcontext():
            ids = torch.arange(200, device="cuda").view(2, 100)
            model(ids, labels=ids, use_cache=False).loss.backward()
        factors = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
        values[name] = torch.cat(factors)
    exact = values.pop("exact")
    return {name: error(value, exact) for name, value in values.items()}


def compare_steps():
    model = llama()
    fuse_kernels(model)
    prompts = [[5] * 20, [6] * 30, [7] * 100]
    logits = []
    for record in (None, lambda step: step):
        rows, steps = SlotRows(model, pad_id=0, record=record), []
        with torch.inference_mode(), rows.kernels():
            rows.join(prompts, [0] * 3)
            for number in range(40):
                steps.append(rows.step([number + 8] * len(rows)).clone())
                if number == 9:
                    rows.leave(0)
        logits.append(steps)
    return max(error(replayed, plain) for replayed, plain in zip(*logits, strict=True))


def drawn(kind, *, plain):
    """Tokens and log-probabilities of adapted layers by few kernels, or as they are."""
    model = adapted(tiny_model(kind).to("cuda"), 0)
    if plain:
        keep_plain(model)
    decoder = Decoder(model, eos_ids=[2], pad_id=0, device=model.device)
    prompts, seeds = [[5] * 9, [6, 7]], [[1, 2, 3], [4, 5, 6]]
    answers = decoder(prompts, Sampling(20), seeds=seeds, keep_logprobs=True)
    return answers.tokens(), answers.logprobs()


def compare_decoding():
    """The largest difference of log-probabilities; infinite where tokens differ."""
    decoded = []
    for kind in ("opt", "llama", "qwen2", "qwen3"):
        (tokens, logprobs), (others, expected) = (drawn(kind, plain=each) for each in (False, True))
        pairs = zip(chain.from_iterable(logprobs), chain.from_iterable(expected), strict=True)
        same = tokens == others
        decoded.append(max(abs(x - y) for x, y in pairs) if same else float("inf"))
    return decoded


found = compare_values() | {"steps": compare_steps(), "adapters": compare_adapters()}
found |= {"decoding": compare_decoding()}
sys.stdout.write(json.dumps(found))
