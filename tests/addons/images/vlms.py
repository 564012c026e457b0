"""Tiny models that see, as a directory that people load: weights, tokenizer, processor."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.data.media import media_reader
from dschat_lora.data.prepare import prepare
from dschat_lora.models.loading import load_tokenizer
from helpers.composites import save_composite

_HALF = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
_TILES = {
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
    "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
}
_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
}
_SPLIT = {
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": 32},
    "do_image_splitting": True,
}
_SPLIT_VISION = {"image_size": 32, "patch_size": 8}
_VISION_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_SPLIT_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
_GEMMA = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>"}
_GEMMA |= {"eoi_token": "<end_of_image>"}
_GEMMA4 = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
_GEMMA4 |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
_INTERN = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_VIDEO_CLASS = {
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "gemma4": "Gemma4VideoProcessor",
    "gemma4_unified": "Gemma4UnifiedVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "qwen3_5_moe": "Qwen3VLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "internvl": "InternVLVideoProcessor",
}
# By model type: what the chat template writes for a picture, the tokenizer's tokens by name or
# without, the image processor, the processor, and the fields of the configuration: the vision
# tower's and the composite's own, where a string is a token's.
_KINDS = {
    "llava_next": (
        "<image>\n",
        ("<image>",),
        _TILES,
        {
            "processor_class": "LlavaNextProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        {"num_hidden_layers": 2},
        {
            "image_token_index": "<image>",
            "image_grid_pinpoints": _TILES["image_grid_pinpoints"],
            "image_seq_length": 4,
        },
    ),
    "llava_onevision": (
        "<image>\n",
        ("<image>", "<video>"),
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 16], *_TILES["image_grid_pinpoints"]],
        },
        {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
        },
        {"vision_use_head": False},
        {
            "image_token_index": "<image>",
            "video_token_index": "<video>",
            "image_grid_pinpoints": [[16, 16], *_TILES["image_grid_pinpoints"]],
        },
    ),
    "gemma3": (
        "<start_of_image>",
        _GEMMA,
        {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            "do_pan_and_scan": None,
        },
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        {"image_size": 32},
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    "gemma4": (
        "<|image|>",
        _GEMMA4,
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        {"processor_class": "Gemma4Processor", "image_seq_length": 70},
        {"pooling_kernel_size": 2, "position_embedding_size": 160},
        {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>",
            "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
            "video_token_id": "<|video|>",
        },
    ),
    "idefics3": (
        "<image>",
        _SPLIT_TOKENS,
        {"image_processor_type": "Idefics3ImageProcessor"} | _SPLIT,
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        _SPLIT_VISION,
        {"image_token_id": "<image>", "scale_factor": 2},
    ),
    "smolvlm": (
        "<image>",
        (*_SPLIT_TOKENS, "<video>"),
        {"image_processor_type": "SmolVLMImageProcessor"} | _SPLIT,
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        _SPLIT_VISION,
        {"image_token_id": "<image>", "scale_factor": 2},
    ),
    "internvl": (
        "<IMG_CONTEXT>\n",
        _INTERN,
        {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 4,
        },
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {"image_size": [32, 32], "patch_size": [8, 8]},
        {"image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4},
    ),
}
_KINDS["mistral3"] = (
    "[IMG]",
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": 8,
        "size": {"longest_edge": 32},
    },
    {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
    {"image_size": 32},
    {"image_token_index": "[IMG]", "spatial_merge_size": 2},
)
_KINDS["lfm2_vl"] = (
    "<image>",
    (
        *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
    ),
    {
        "image_processor_type": "Lfm2VlImageProcessor",
        "encoder_patch_size": 8,
        "min_image_tokens": 2,
        "max_image_tokens": 4,
        "max_tiles": 4,
        "tile_size": 32,
    },
    {"processor_class": "Lfm2VlProcessor"},
    {"num_patches": 16, "vision_use_head": False},
    {"image_token_id": "<image>", "projector_hidden_size": 32},
)
_KINDS["gemma4_unified"] = (
    *_KINDS["gemma4"][:2],
    _KINDS["gemma4"][2] | {"image_processor_type": "Gemma4UnifiedImageProcessor"},
    _KINDS["gemma4"][3] | {"processor_class": "Gemma4UnifiedProcessor"},
    {"pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 128, "output_proj_dims": 32},
    _KINDS["gemma4"][5] | {"audio_config": None},
)
TORCHVISION = tuple(_KINDS)[-3:]  # whose pictures need it
for _kind, _class in {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
}.items():
    _KINDS[_kind] = (
        "<|vision_start|><|image_pad|><|vision_end|>",
        _VISION_TOKENS,
        _QWEN,
        {"processor_class": _class},
        {"window_size": 32, "fullatt_block_indexes": [0]} if _kind == "qwen2_5_vl" else {},
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
    )
SEEING = tuple(kind for kind in _KINDS if kind not in TORCHVISION)


def spread(*some, smoke=(), of=SEEING):
    """Types to test: ``some`` by default, ``smoke`` by ``make test`` too, all others thoroughly."""
    marks = dict.fromkeys(some, ()) | dict.fromkeys(smoke, pytest.mark.smoke)
    return [pytest.param(kind, marks=marks.get(kind, pytest.mark.thorough)) for kind in of]


def tiny_vlm(family, folder, *, seed=0, text=None):
    """Save a random model of a composite type with its tokenizer and processor; its path.

    Fields of the text tower's configuration can be given.

    It is what stock ``AutoModelForImageTextToText.from_pretrained`` loads: two layers of width
    32, vision towers of patches of 8 pixels, a few tokens for a picture of 20 to 60 pixels.
    """
    written, tokens, image_processor, processor, vision, own = _KINDS[family]
    folder = Path(folder)
    named = tokens if isinstance(tokens, dict) else {}
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL, extra_special_tokens=named)
    others = [*tokens] if not named else ["<|video|>"] if family.startswith("gemma4") else []
    tokenizer.add_special_tokens({"additional_special_tokens": others})
    ids = {
        name: tokenizer.convert_tokens_to_ids(each) if isinstance(each, str) else each
        for name, each in own.items()
    }
    template = (
        "{%- for message in messages %}{{ '<|' + message.role + '|>' }}"
        "{%- if message.content is string %}{{ message.content }}{%- else %}"
        "{%- for part in message.content %}"
        "{%- if part.type == 'image' %}{{ " + repr(written) + " }}"
        "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
        "{{ eos_token }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
    )
    tokenizer.chat_template = template
    save_composite(
        family, folder, tokenizer=tokenizer, text=text, vision=vision, own=ids, seed=seed
    )
    files = {
        "preprocessor_config.json": _HALF
        | image_processor
        | {"processor_class": processor["processor_class"]},
        "processor_config.json": processor,
    }
    if family in _VIDEO_CLASS:
        files["video_preprocessor_config.json"] = {"video_processor_type": _VIDEO_CLASS[family]}
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return folder


def drawn(width, height, *, seed=0, mode="RGB"):
    """A picture of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(colours).convert(mode)


def prepared_by(config, base, cache, kind="samples"):
    """A tokenizer, what reads pictures for the model at ``base``, and data by ``config.data``."""
    tokenizer = load_tokenizer(str(base), config.model)
    media = media_reader(config, tokenizer, str(base))
    prepared = prepare(
        config.data,
        tokenizer,
        phase=1,
        seed=1,
        eos_id=tokenizer.eos_token_id,
        cache_dir=cache,
        kind=kind,
        media=media,
    )
    return tokenizer, media, prepared
