"""Configurations of published models, to plan and to measure with their shapes but no files.

The fields are those of each model's ``config.json`` on the hub that decide about shapes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Fields = Mapping[str, Any]

_WORDS = re.compile(r"^meta-|-(hf|base|instruct|chat|it)\b|-v\d+(\.\d+)?$|-\d{4}$")


def _opt(hidden_size: int, layers: int, heads: int, **others: object) -> Fields:
    return {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": hidden_size,
        "word_embed_proj_dim": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        **others,
    }


def _llama(
    sizes: tuple[int, int], layers: int, heads: tuple[int, int], vocabulary: int, **others: object
) -> Fields:
    """Of (hidden, MLP) sizes and (query, key) heads; an untied head of 4096 positions."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes[0],
        "intermediate_size": sizes[1],
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **others,
    }


def _qwen2(
    sizes: tuple[int, int], layers: int, heads: tuple[int, int], vocabulary: int, **others: object
) -> Fields:
    kind = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    positions = {"max_position_embeddings": 32768}
    return {**_llama(sizes, layers, heads, vocabulary), **kind, **positions, **others}


def _qwen3(sizes: tuple[int, int], layers: int, heads: int, *, tied: bool) -> Fields:
    return {
        **_llama(sizes, layers, (heads, 8), 151936),
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
    }


_LONG: Fields = {"max_position_embeddings": 131072}
_TIED: Fields = {"tie_word_embeddings": True}
PUBLISHED: Mapping[str, Fields] = {
    "facebook/opt-125m": _opt(768, 12, 12),
    "facebook/opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _opt(2048, 24, 32),
    "facebook/opt-2.7b": _opt(2560, 32, 32),
    "facebook/opt-6.7b": _opt(4096, 32, 32),
    "facebook/opt-13b": _opt(5120, 40, 40),
    "meta-llama/Llama-2-7b-hf": _llama((4096, 11008), 32, (32, 32), 32000),
    "meta-llama/Llama-2-13b-hf": _llama((5120, 13824), 40, (40, 40), 32000),
    "meta-llama/Meta-Llama-3-8B": _llama(
        (4096, 14336), 32, (32, 8), 128256, max_position_embeddings=8192
    ),
    "meta-llama/Llama-3.1-8B": _llama((4096, 14336), 32, (32, 8), 128256, **_LONG),
    "meta-llama/Llama-3.2-1B": _llama(
        (2048, 8192), 16, (32, 8), 128256, head_dim=64, **_LONG, **_TIED
    ),
    "meta-llama/Llama-3.2-3B": _llama(
        (3072, 8192), 28, (24, 8), 128256, head_dim=128, **_LONG, **_TIED
    ),
    "mistralai/Mistral-7B-v0.3": {
        **_llama((4096, 14336), 32, (32, 8), 32768, max_position_embeddings=32768),
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    },
    "Qwen/Qwen2.5-0.5B": _qwen2((896, 4864), 24, (14, 2), 151936, **_TIED),
    "Qwen/Qwen2.5-1.5B": _qwen2((1536, 8960), 28, (12, 2), 151936, **_TIED),
    "Qwen/Qwen2.5-3B": _qwen2((2048, 11008), 36, (16, 2), 151936, **_TIED),
    "Qwen/Qwen2.5-7B": _qwen2((3584, 18944), 28, (28, 4), 152064),
    "Qwen/Qwen2.5-14B": _qwen2((5120, 13824), 48, (40, 8), 152064),
    "Qwen/Qwen3-0.6B": _qwen3((1024, 3072), 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3((2048, 6144), 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3((2560, 9728), 36, 32, tied=True),
    "Qwen/Qwen3-8B": _qwen3((4096, 12288), 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3((5120, 17408), 40, 40, tied=False),
}


def published_name(given: str) -> str | None:
    """The name of a model in the table, None for another.

    Upper case, the organisation, and words such as ``Instruct`` or ``hf`` do not matter:
    ``Llama-2-7b-chat-hf`` has the shape of ``meta-llama/Llama-2-7b-hf``. A path is no name.
    """
    if given.count("/") > 1 or given.startswith((".", "/", "~", "output/")):
        return None
    return next((name for name in PUBLISHED if _plain(name) == _plain(given)), None)


def _plain(name: str) -> str:
    """The last part of a name in lower case, without words that say nothing of the shape."""
    before, plain = "", name.rstrip("/").rpartition("/")[2].lower()
    while plain != before:
        before, plain = plain, _WORDS.sub("", plain)
    return plain


def write_config(directory: Path, fields: Fields) -> None:
    """A ``config.json`` in a new directory, which stands for a model without weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
