"""The most memory that a process held, and a model that stands out in it."""

import gc
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def peak_memory():
    """Bytes of the most memory this process held since :func:`forget_peak`. Linux alone."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak():
    """Let the peak be what this process holds at this moment."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def save_wide_model(directory):
    """A model whose memory stands out, of values that need not be drawn."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().fill_(0.01)
    model.save_pretrained(directory)
