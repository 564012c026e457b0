"""Tiny models with random weights of the families that people fine-tune, as directories."""

import shutil
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dschat_lora import assets
from fakecuda import programs

MODEL = Path(assets.__file__).parent / "model"  # whose tokenizer they take
_SIZE = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_PARTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def _stretched(kind, **parameters):
    """Llama with rotary embeddings that reach further than those it was trained with."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **parameters}
    return "llama", {"rope_parameters": rope}


# name -> (type, what differs from the sizes above)
FAMILIES = {
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("gpt_neox", {}),
    "llama": ("llama", {}),
    "llama linear": _stretched("linear"),
    "llama dynamic": _stretched("dynamic"),
    "llama yarn": _stretched("yarn", original_max_position_embeddings=128),
    "llama longrope": _stretched("longrope", original_max_position_embeddings=128, **_PARTS),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 16, "layer_types": _MIXED}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "olmo3": ("olmo3", {"sliding_window": 16, "layer_types": _MIXED}),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "granite": ("granite", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, **_EXPERTS}),
    "olmoe": ("olmoe", _EXPERTS),
}


def write_model(family, layers, directory):
    """Write weights, configuration and tokenizer of a family's model."""
    kind, others = FAMILIES[family]
    config = AutoConfig.for_model(kind, **_SIZE | others)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)


def stage_of(family, layers, directory, **stage):
    """:func:`fakecuda.programs.stage` of a family's model; ``said`` is what it says of graphs."""
    write_model(family, layers, directory)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = programs.stage(**stage)
    words = [str(each.message) for each in said]
    return found | {"said": [text for text in words if "CUDA graphs" in text]}
