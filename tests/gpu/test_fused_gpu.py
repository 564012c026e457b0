"""On a GPU: norms and rotary embeddings by few kernels, and steps that are replayed for requests."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_lora.generation.slots import SlotRows
from dschat_lora.models.fused import fuse_kernels

pytestmark = pytest.mark.gpu
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


def test_fp32_values_are_those_of_plain_operations_and_bf16_ones_are_no_further_off():
    exact, rounded, fused = values_of(llama()), values_of(llama(torch.bfloat16)), []
    for dtype in (torch.float32, torch.bfloat16):
        model = llama(dtype)
        fuse_kernels(model)
        fused.append(values_of(model))
    for number in range(2):
        assert error(fused[0][number], exact[number]) < 1e-5
        plain = error(rounded[number], exact[number])
        assert error(fused[1][number], exact[number]) < 1.1 * plain


def test_replayed_steps_have_the_logits_of_steps_as_they_are():
    model = llama()
    fuse_kernels(model)
    prompts = [[5] * 20, [6] * 30, [7] * 100]
    logits = []
    for record in (None, lambda step: step):
        rows, found = SlotRows(model, pad_id=0, record=record), []
        with torch.inference_mode(), rows.kernels():
            rows.join(prompts, [0] * 3)
            for number in range(40):
                found.append(rows.step([number + 8] * len(rows)).clone())
                if number == 9:
                    rows.leave(0)
        logits.append(found)
    for replayed, plain in zip(*logits, strict=True):
        assert error(replayed, plain) < 1e-5
