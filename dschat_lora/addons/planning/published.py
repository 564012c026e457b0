"""Configurations of published models, and placeholders for models of which no weights are here.

The fields are those of each model's ``config.json`` on the hub that decide about shapes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dschat_lora.addons.pipeline.placeholders import write_adapter, write_config
from dschat_lora.config.groups import LoraConfig
from dschat_lora.models.source import ModelSource

Fields = Mapping[str, Any]
_CRITIC = "critic_model_name_or_path"
MODEL_OPTIONS = (
    *("model_name_or_path", "actor_model_name_or_path", _CRITIC),
    "teacher_model_name_or_path",
)

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


def with_placeholders(stage: str, options: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """The options with a placeholder below ``home`` for each published model that they name.

    The critic's is a reward model: an adapter of ``--critic_lora_dim`` on that base if there is
    one, as the reward stage leaves it. A ``config.json`` stands for its directory.
    """
    values = dict(options)
    for option in MODEL_OPTIONS:
        given = values.get(option)
        if not isinstance(given, str) or "://" in given or Path(given).expanduser().is_dir():
            continue
        if Path(given).name == "config.json" and Path(given).expanduser().is_file():
            values[option] = str(Path(given).expanduser().parent)
        elif name := published_name(given):
            base = home / name
            if not base.exists():
                write_config(base, PUBLISHED[name])
            values[option] = str(base)
            if option == _CRITIC:
                values[_CRITIC] = _write_reward_model(values, base)
    return values


def _write_reward_model(values: dict[str, Any], base: Path) -> str:
    """A placeholder for a reward model on ``base``; takes the options that its adapter holds."""
    rank, home = values.get("critic_lora_dim", 0), base.with_name(f"{base.name}-reward")
    if not rank:
        fields = json.loads((base / "config.json").read_text(encoding="utf-8"))
        write_config(home, fields | {"architectures": ["ForSequenceClassification"]})
        return str(home)
    own = {
        name.removeprefix("critic_"): values.pop(name)
        for name in ("critic_target_modules", "critic_lora_module_name")
        if name in values
    }
    scale = {
        n: values[f"critic_{n}"] for n in ("lora_alpha", "use_rslora") if f"critic_{n}" in values
    }
    lora = LoraConfig(lora_dim=rank, **own, **scale)
    bits = values.get("base_bits")
    write_adapter(home / "adapter", lora, str(base), scores=True, bits=bits)
    return str(home)


def as_planned(source: ModelSource, home: Path) -> ModelSource:
    """The source, without weights to read where its adapter is a placeholder in ``home``."""
    if source.adapter is None or not source.adapter.is_relative_to(home):
        return source
    config = source.adapter_config
    assert config is not None
    targets = config.target_modules
    lora = LoraConfig(
        lora_dim=config.r,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        target_modules=(targets,) if isinstance(targets, str) else targets,
        modules_to_save=config.modules_to_save,
        enable_lora=config.enable_lora,
    )
    return replace(source, planned=lora)
