"""Tiny composite checkpoints of random weights: text, vision and what joins them."""

from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.models.timm_wrapper import TimmWrapperModel

from dschat_lora.assets import BUNDLED_MODEL
from helpers.kinds import tiny_config

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_KINDS = ["sliding_attention", "full_attention"]
_QWEN = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Of text models with heads of 16.
_WIDER = _MROPE | {"mrope_section": [4, 2, 2]}
_INDEXED = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
_AUDIO = {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2}
# By model type: the text tower's fields, the vision tower's, and the composite's own.
_FIELDS = {
    "gemma3": (
        {"sliding_window": 16, "layer_types": _KINDS, "tie_word_embeddings": True},
        {},
        {"mm_tokens_per_image": 4, "tie_word_embeddings": True},
    ),
    "gemma3n": (
        {
            "sliding_window": 16,
            "layer_types": _KINDS,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "hidden_size_per_layer_input": 4,
            "activation_sparsity_pattern": [0.5, 0.0],
            "tie_word_embeddings": True,
        },
        {"architecture": "mobilenetv5_300m_enc", "hidden_size": 16},
        {"audio_config": _AUDIO, "tie_word_embeddings": True},
    ),
    "gemma4": (
        {
            "sliding_window": 16,
            "layer_types": _KINDS,
            "hidden_size_per_layer_input": 4,
            "tie_word_embeddings": True,
        },
        {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64},
        {"tie_word_embeddings": True, "audio_config": None},
    ),
    "qwen3_5": (_LINEAR | {"rope_parameters": _MROPE | {"partial_rotary_factor": 1.0}}, _QWEN, {}),
    "qwen3_vl": ({"rope_parameters": _MROPE}, _QWEN | {"deepstack_visual_indexes": [0]}, {}),
    "mistral3": (
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 8},
        {"tie_word_embeddings": False, "vision_feature_layer": -1},
    ),
    "llama4": (
        {
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
        },
        {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "smolvlm": ({"model_type": "llama", "pad_token_id": 0}, {}, {"scale_factor": 2}),
    "mllama": (
        {"cross_attention_layers": [1], "num_hidden_layers": 3, "bos_token_id": 1},
        {
            "attention_heads": 2,
            "num_global_layers": 1,
            "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
        },
        {},
    ),
    "qwen2_5_vl": ({"rope_parameters": _MROPE}, _QWEN, {}),
    "internvl": ({"model_type": "qwen2"}, {}, {}),
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}, {}),
    "llava_next": ({"model_type": "mistral"}, {"model_type": "clip_vision_model"}, {}),
    "llava_onevision": ({"model_type": "qwen2"}, {}, {}),
    "qwen3_5_moe": (
        _LINEAR
        | {
            "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        _QWEN,
        {},
    ),
}
# Likewise, of types whose text model is tried by itself too: changes of that tiny model.
_ALSO_ALONE = {
    "gemma4_unified": (
        {"tie_word_embeddings": True},
        {"patch_size": 4, "mm_embed_dim": 64, "mm_posemb_size": 16, "output_proj_dims": 64},
        {"audio_config": None, "tie_word_embeddings": True},
    ),
    "qwen4_exp": (
        {"rope_parameters": _WIDER | {"partial_rotary_factor": 1.0}},
        _QWEN | {"out_hidden_size": 64},
        {},
    ),
    "minimax_m3_vl": ({}, {"hidden_size": 24}, {"projector_hidden_size": 16}),
    "cohere_compass": (
        {"rope_parameters": dict.fromkeys(_KINDS, _WIDER), "tie_word_embeddings": True},
        _QWEN | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "inkling_mm_model": (
        {},
        {"text_hidden_size": 64, "num_hidden_layers": 4},
        {"audio_config": {"text_hidden_size": 64, "n_mel_bins": 4, "mel_vocab_size": 8}},
    ),
    "inkling2": ({}, {"projection_hidden_dim": 16, "text_hidden_size": 64}, {}),
    "apertus1p5": (
        {},
        {"codebook_size": 64, "base_channels": 32, "channel_multiplier": [1, 1]},
        {"image_token_offset": 700, "audio_token_offset": 764}
        | {"audio_config": {"codebook_size": 64}},
    ),
    "hy_v4_vl": (
        {"rope_parameters": _MROPE, **_INDEXED},
        {"out_hidden_size": 64, "max_image_size": 64},
        {},
    ),
}
# Of inkling2 PEFT drops factors, as the start-up says.
_KNOWN = {*CONFIG_MAPPING} - {"inkling2"}
COMPOSITES = (*_FIELDS, *(kind for kind in _ALSO_ALONE if kind in _KNOWN))
# Likewise, of types that tests with pictures take.
_LIKE = {
    "idefics3": _FIELDS["smolvlm"],
    "lfm2_vl": ({"layer_types": ["conv", "full_attention"]}, {}, {}),
}


def save_composite(
    kind, directory, *, tokenizer=None, text=None, vision=None, own=None, seed=0
) -> Path:
    """A random composite model with a tokenizer, under the keys that are published.

    Args:
        kind: the type, as a configuration's ``model_type``.
        directory: where it goes.
        tokenizer: the bundled one by default.
        text: further fields of the text tower.
        vision: further fields of the vision tower.
        own: further fields of the composite, ids of image tokens among them.
        seed: of the weights.
    """
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    text_fields, vision_fields, own_fields = (_FIELDS | _ALSO_ALONE | _LIKE)[kind]
    tokens = {
        "vocab_size": len(tokenizer),
        "vocab_size_per_layer_input": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    default = AutoConfig.for_model(kind).to_dict()
    if kind in _FIELDS or kind in _LIKE:
        text_fields = tokens | _TEXT | text_fields
    else:
        base = tiny_config(default["text_config"]["model_type"], **text_fields)
        text_fields = base.to_dict() | tokens
    # Ids of images, which no text of the tokenizer has.
    ids = [name for name in default if name.endswith(("token_id", "token_index"))]
    config = AutoConfig.for_model(
        kind,
        text_config=text_fields | (text or {}),
        vision_config=_VISION | vision_fields | (vision or {}),
        **dict(zip(ids, range(10_000, 11_000), strict=False)) | own_fields | (own or {}),
    )
    with torch.random.fork_rng(), without_timm():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def whole_model(directory: Path) -> PreTrainedModel:
    """transformers' model of the checkpoint."""
    with without_timm():
        return AutoModelForImageTextToText.from_pretrained(directory)


@contextmanager
def without_timm():
    """Within, a vision tower that takes timm is a linear layer, for timm is not installed."""
    init = TimmWrapperModel.__init__

    def plain(self, config):
        PreTrainedModel.__init__(self, config)
        self.timm_model = nn.Linear(4, 4)
        self.post_init()

    TimmWrapperModel.__init__ = plain
    try:
        yield
    finally:
        TimmWrapperModel.__init__ = init
