"""Tiny configurations of many types of transformers, and the types that are not tried.

A type that a new version of transformers adds to its causal language models goes into ``TYPES``,
with what its tiny model needs in ``_OTHERS``, or into ``LEFT_OUT``.
"""

from transformers import AutoConfig

SIZE = {
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
# What some types know besides, by value.
_FURTHER = {
    0: ("first_k_dense_replace", "moe_layer_start_index"),
    1: ("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group", "mamba_n_groups"),
    2: ("num_experts_per_tok", "moe_k", "moe_topk", "linear_num_key_heads", "n_groups", "expand"),
    4: (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("linear_num_value_heads", "linear_num_heads"),
    ),
    8: (
        *("num_heads", "mamba_n_heads", "mamba_num_heads", "rotary_dim", "mamba_chunk_size"),
        *("chunk_size", "attention_chunk_size", "sliding_window", "attention_window_size"),
    ),
    16: (
        *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head"),
        *("mamba_d_state", "state_size", "ssm_state_size", "mamba_head_dim"),
    ),
    32: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        "moe_shared_expert_intermediate_size",
    ),
}
_LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16)
_LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "head_dim"), 8)
_LATENT["num_key_value_heads"] = 4
_FULL, _LINEAR = "full_attention", "linear_attention"
_SLIDING = ["sliding_attention", _FULL]
_TINY_SHARED = {"vocab_size_per_layer_input": 1024, "hidden_size_per_layer_input": 8}
# At least as many as there are tokens: of equal scores, which a tiny indexer has, any is taken.
_SELECTED = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Of inkling: layers with windows have heads of their own.
_WINDOWS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
_WINDOWS |= {"sliding_window_size": 8, "rel_extent": 8, "unpadded_vocab_size": 1000}
# Types that need something else, and what.
_OTHERS = {
    "apertus1p5_text": {"output_vocab_size": 1000},
    "axk2": _SELECTED,
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"mlp_layer_types": ["sparse"] * 2},
    "cohere_compass_text": {"rope_parameters": {_FULL: _ROPE, "sliding_attention": _ROPE}}
    | {"layer_types": _SLIDING},
    "cwm": {"bos_token_id": 3},
    "deepseek_v32": _SELECTED,
    "deepseek_v4": _SELECTED
    | {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "num_key_value_heads": 1}
    | {"num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    | {
        "layer_types": ["sliding_attention", _SPARSE, _HEAVY],
        "compress_rates": {_SPARSE: 4, _HEAVY: 8},
    },
    "dory": dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1)
    | {"num_hidden_layers": 3, "layer_types": [*_SLIDING, _FULL]},
    "dots3_note_text": _SELECTED
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16}
    | {"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3_text": {"layer_types": _SLIDING},
    "gemma3n_text": {
        **_TINY_SHARED,
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [*_SLIDING] * 2},
        **{"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4},
    },
    "gemma4_text": {
        **_TINY_SHARED,
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [*_SLIDING] * 2},
        **{"head_dim": 16, "global_head_dim": 16},
    },
    "gemma4_unified_text": {"layer_types": _SLIDING, "head_dim": 16, "global_head_dim": 16},
    "glm_moe_dsa": _SELECTED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": [_LINEAR, _FULL]},
    "hy_v4": _SELECTED | {"indexer_types": ["full", "shared"]},
    "inkling_text": _WINDOWS,
    "inkling2_text": _WINDOWS,
    "inkling2_loop_text": _WINDOWS
    | {
        "num_hidden_layers": 4,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 8,
    }
    | {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "n_layers_per_attn_res_block": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"num_experts_per_token": 2},
    "lara_mini": {"num_hidden_layers": 3, "layer_types": [_LINEAR, *_SLIDING]},
    "lfm2": {"layer_types": ["conv", _FULL], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", _FULL], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", _FULL]},
    "longcat_flash": {
        **{"num_layers": 2, "zero_expert_num": 2, "moe_topk": 2},
        **{"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32},
    },
    "ministral": {"layer_types": _SLIDING},
    "minimax_m3_vl_text": {
        **{"layer_types": ["minimax_m3_sparse", _FULL], "mlp_layer_types": ["sparse", "dense"]},
        **{
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "dense_intermediate_size": 96,
        },
    },
    "modernbert-decoder": {"bos_token_id": 3, "local_attention": 8, "layer_types": _SLIDING},
    "nemotron_h": {"layer_types": [_LINEAR, "moe", _FULL, "mlp"], "num_hidden_layers": 4},
    "qwen4_exp_text": {
        **{
            "ple_layer_ids": [1],
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 2,
            "hc_lowrank": 8,
        },
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 64, "indexer_compress_ratio": 4},
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "zamba": {
        "num_hidden_layers": 4,
        "layer_types": [_LINEAR, "hybrid"] * 2,
        "n_mamba_heads": 2,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        **{"layers_block_type": [_LINEAR, "hybrid"] * 2, "n_mamba_heads": 8},
        **{"num_hidden_layers": 4, "mamba_ngroups": 1, "num_key_value_heads": 4},
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind, size=SIZE, **others):
    """The configuration of a type, which gets what it knows of the sizes, and ``others``."""
    default = AutoConfig.for_model(kind)
    fields = vars(default)
    known = {name: value for value, names in _FURTHER.items() for name in names}
    asked = size | others
    known["word_embed_proj_dim"] = asked["hidden_size"]
    known["ffn_dim"] = asked["intermediate_size"]
    known["head_dim"] = asked["hidden_size"] // asked["num_attention_heads"]
    if "kv_lora_rank" in fields:
        known |= _LATENT
    if fields.get("sliding_window") is None:
        del known["sliding_window"]
    names = {*fields, *default.attribute_map, "num_hidden_layers", "pad_token_id"}
    # What is no variable follows from others.
    sizes = {n: v for n, v in size.items() if n in names}
    sizes |= {n: v for n, v in known.items() if n in fields}
    if layers := [*dict.fromkeys(fields.get("layer_types") or ())]:
        count = asked["num_hidden_layers"]
        sizes["layer_types"] = (layers * count)[:count]
    others = _OTHERS.get(kind, {}) | others
    own = default.attribute_map
    given = {own.get(name, name) for name in others}
    sizes = {name: size for name, size in sizes.items() if own.get(name, name) not in given}
    return AutoConfig.for_model(kind, **sizes, **others)


# Causal language models that are tried.
TYPES = (
    *("afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2"),
    *("bailing_hybrid", "bamba", "beam", "biogpt", "bitnet", "bloom", "codegen", "cohere"),
    *("cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "deepseek_v2", "deepseek_v3"),
    *("deepseek_v32", "deepseek_v4", "diffllama", "doge", "dory", "dots1", "dots3_note_text"),
    *("ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1"),
    *("falcon_mamba", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
    *("gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss"),
    *("gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
    *("granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    *("hy_v4", "hyperclovax", "inkling2_loop_text", "inkling2_text", "inkling_text", "jais2"),
    *("jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2", "lfm2_moe"),
    *("lfm3", "llama", "llama4_text", "longcat_flash", "mamba", "mamba2", "mellum"),
    *("mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral"),
    *("ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron"),
    *("nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "opt"),
    *("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "sarvam_mla"),
    *("sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma"),
    *("xglm", "youtu", "zamba", "zamba2", "zaya"),
)
_REASONS = {
    "a decoder of an encoder-decoder model": (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "moshi"),
        *("musicgen", "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr"),
        "whisper",
    ),
    "an encoder, whose tokens see those after them": (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
        *("roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "a composite with images or sound, whose text model is a type of its own": (
        *("dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git"),
        *("got_ocr2", "llama4", "mllama", "moss_transcribe_diarize", "phi4_multimodal"),
        *("qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    ),
    "a draft model beside another": ("gemma4_assistant", "gemma4_unified_assistant"),
    "the class of another type": ("gpt-sw3", "internlm3", "iquestcoder"),
    "reads bytes by a tokenizer within": ("blt",),
    "reads other inputs than tokens": ("cpmant",),
    "its code on a CPU fails in transformers itself": ("dbrx", "rwkv", "xlstm"),
}
# Type -> why it is not tried.
LEFT_OUT = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds}
