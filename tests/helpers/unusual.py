"""Tiny random models of types whose attention is not plain: recurrent, sliding, capped, latent."""

from transformers import AutoConfig

from helpers.tiny import IDS, SHAPE, VOCAB, random_model

_SIZES = SHAPE | {"max_position_embeddings": 256}
_HEADS = _SIZES | {"head_dim": 8}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    "num_experts_per_tok": 2,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_chunk_size"), 8),
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}
_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 16}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_routed_experts", "num_key_value_heads"), 4),
    "num_experts_per_tok": 2,
    "v_head_dim": 12,
}
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_ZAMBA = _SIZES | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "attention_head_dim": 16,
    "attention_hidden_size": 64,
    "mamba_d_state": 16,
}
RECURRENT = {
    "qwen3_5_text": _HEADS | _DELTA,
    "lfm2": _SIZES | {"layer_types": ["conv", "full_attention"], "conv_bias": True},
    "mamba2": IDS | _STATES | dict.fromkeys(("num_heads", "head_dim", "chunk_size", "n_groups"), 8),
    "falcon_h1": _HEADS | _MAMBA | {"mamba_d_ssm": 64},
    "qwen3_next": _HEADS | _DELTA | _EXPERTS,
    "qwen3_5_moe_text": _HEADS | _DELTA | _EXPERTS,
    "olmo_hybrid": _SIZES | _DELTA,
    "lfm2_moe": _SIZES | _EXPERTS | {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": _SIZES
    | _MAMBA
    | _EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 16},
    "bamba": _SIZES | _MAMBA | {"attn_layer_indices": [1]},
    "nemotron_h": {name: size for name, size in _HEADS.items() if name != "num_hidden_layers"}
    | dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "chunk_size"), 8)
    | {"layers_block_type": ["mamba", "attention", "mlp"], "n_groups": 2, "ssm_state_size": 16},
    "zamba": _ZAMBA | {"n_mamba_heads": 2},
    "zamba2": _ZAMBA | dict.fromkeys(("n_mamba_heads", "mamba_headdim", "chunk_size"), 8),
}
# Recurrent too, but their blocks keep what they are told of sequences from their layers.
UNPACKED = {
    "mamba": IDS | _STATES,
    "jamba": _SIZES
    | _EXPERTS
    | dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2)
    | {"attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
}
# Without a cache of ours: states, or a cache of their own, lie in the layers.
UNCACHED = {
    "recurrent_gemma": _HEADS
    | {"lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"]},
    "minimax": _HEADS
    | _EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
}
ATTENTION = {
    "gpt_oss": _HEADS | _EXPERTS | _SLIDING,
    "gemma2": _HEADS
    | _SLIDING
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "deepseek_v3": _SIZES | _LATENT,
    "diffllama": _HEADS,
    "deepseek_v2": _SIZES | _LATENT | {"topk_method": "greedy"},
    "gemma3_text": _HEADS | _SLIDING,
    "gemma4_text": _HEADS | _SHARED_KEYS | {"global_head_dim": 16},
    "gemma3n_text": _HEADS
    | _SHARED_KEYS
    | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None}
    | {"intermediate_size": [48] * 4},
}
CONFIGS = RECURRENT | UNPACKED | UNCACHED | ATTENTION
# Kinds of state and attention that differ; the others are theirs in other arrangements.
FEW = ("qwen3_5_text", "lfm2", "mamba2", "falcon_h1", "gpt_oss", "gemma2", "deepseek_v3")


def unusual_model(kind, **options):
    """A model of the type in evaluation mode, on weights so large that a wrong state shows."""
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    for name, value in vars(config).items():
        if name.endswith("dropout") and isinstance(value, float):
            setattr(config, name, 0.0)
    return random_model(config, **options)
