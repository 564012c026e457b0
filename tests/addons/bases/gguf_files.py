"""Tiny GGUF files, written by the format's own package, with the bundled tokenizer in them."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig

from dschat_lora.assets import BUNDLED_MODEL

SIZE = 64
_SHAPE = {
    "vocab_size": 1024,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS = {
    # transformers reads it by itself, weight by weight.
    "lfm2": Lfm2Config(
        **_SHAPE,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        norm_eps=1e-5,
    ),
    # By the package gguf, all weights at once.
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=False, rms_norm_eps=1e-5),
}
_NAMES = {
    r"^model\.embed_tokens\.": "token_embd.",
    r"^model\.embedding_norm\.": "token_embd_norm.",
    r"^model\.norm\.": "output_norm.",
    r"^lm_head\.": "output.",
    r"^model\.layers\.": "blk.",
    r"\.(operator_norm|input_layernorm)\.": ".attn_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.self_attn\.([qkv])_proj\.": r".attn_\1.",
    r"\.self_attn\.(o|out)_proj\.": ".attn_output.",
    r"\.self_attn\.([qk])_layernorm\.": r".attn_\1_norm.",
    r"\.(feed_forward\.w1|mlp\.gate_proj)\.": ".ffn_gate.",
    r"\.(feed_forward\.w3|mlp\.up_proj)\.": ".ffn_up.",
    r"\.(feed_forward\.w2|mlp\.down_proj)\.": ".ffn_down.",
    r"\.conv\.(in_proj|out_proj)\.": r".shortconv.\1.",
    r"\.conv\.conv\.": ".shortconv.conv.",
}


def save_gguf(kind, file):
    """A file with linear layers in Q8_0; the values that it stands for, by the model's names."""
    gguf = pytest.importorskip("gguf")
    packed, numbers = gguf.GGMLQuantizationType.Q8_0, gguf.GGUFValueType
    config, values = CONFIGS[kind], {}
    writer = gguf.GGUFWriter(file, kind)
    for key, value in _metadata(kind, config).items():
        number = numbers.get_type(value)
        writer.add_key_value(key, value, numbers.UINT32 if number == numbers.INT32 else number)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    for name, empty in shapes.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = 0.15 * torch.randn(empty.shape, generator=generator) + ("norm" in name)
        stored = name
        for pattern, replacement in _NAMES.items():
            stored = re.sub(pattern, replacement, stored)
        # llama.cpp interleaves the halves of each head that rotate together.
        is_rotary = kind == "llama" and re.search(r"\.attn_[qk]\.", stored)
        if is_rotary:
            weight = weight.reshape(-1, 2, 8, SIZE).transpose(1, 2).reshape(weight.shape)
        if weight.dim() == 2 and "norm" not in name:
            data = gguf.quants.quantize(weight.numpy(), packed)
            writer.add_tensor(stored, data, raw_dtype=packed)
            weight = torch.from_numpy(gguf.quants.dequantize(data, packed))
        else:
            weight = weight.squeeze(1) if weight.dim() == 3 else weight
            writer.add_tensor(stored, weight.numpy())
        if is_rotary:
            weight = weight.reshape(-1, 8, 2, SIZE).transpose(1, 2).reshape(weight.shape)
        values[name] = weight.reshape(empty.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _metadata(kind, config):
    stored = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    tokens[:3] = "<unk>", "<s>", "</s>"  # which transformers adds where they lack
    merges = [m if isinstance(m, str) else " ".join(m) for m in stored["merges"]]
    heads = [0, 2] if kind == "lfm2" else 2
    fields = {
        "context_length": 512,
        "embedding_length": SIZE,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": SIZE // 4,
        "vocab_size": 1024,
        "shortconv.l_cache": getattr(config, "conv_L_cache", 0),
    }
    return {
        "general.name": "tiny",
        **{f"{kind}.{name}": value for name, value in fields.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
