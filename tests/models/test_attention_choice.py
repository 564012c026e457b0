"""The attention kernel that a model is loaded with, where none is named and where one is."""

import pytest
import torch
from transformers import Gemma2Config

from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.stages import InferenceConfig
from dschat_lora.models.loading import attention_note, load_causal_lm, load_config
from dschat_lora.models.reward_model import load_reward_model
from helpers.tiny import save_tiny_model, unusual_model


def loaded(path, config, *, meta=False, load=load_causal_lm, **options):
    described = load_config(str(path), config)
    return load(str(path), described, config, dtype=torch.float32, meta=meta, **options)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("config", [ModelConfig(), InferenceConfig().model()])
def test_a_model_without_sdpa_is_eager_unasked_and_any_other_is_not(config, meta, tmp_path):
    unusual_model("gemma2").save_pretrained(tmp_path / "gemma2")
    save_tiny_model("llama", tmp_path / "llama")
    eager, fused = (loaded(tmp_path / name, config, meta=meta) for name in ("gemma2", "llama"))
    assert eager.config._attn_implementation == "eager"
    assert attention_note(eager, config) == (
        "attention is eager: gemma2 has no sdpa in transformers"
    )
    assert fused.config._attn_implementation == "sdpa"
    assert attention_note(fused, config) is None


def test_a_reward_model_is_loaded_likewise(tmp_path):
    unusual_model("gemma2").save_pretrained(tmp_path)
    model = loaded(tmp_path, ModelConfig(), load=load_reward_model, seed=0)
    assert isinstance(model.config, Gemma2Config)
    assert model.config._attn_implementation == "eager"


def test_a_kernel_that_is_named_is_taken_or_refused(tmp_path):
    save_tiny_model("llama", tmp_path / "llama")
    config = ModelConfig(attn_implementation="eager")
    model = loaded(tmp_path / "llama", config)
    assert model.config._attn_implementation == "eager"
    assert attention_note(model, config) is None  # as was asked for
    unusual_model("gemma2").save_pretrained(tmp_path / "gemma2")
    message = (
        "--attn_implementation sdpa: gemma2 has no such implementation in transformers; "
        "drop the option to use another"
    )
    with pytest.raises(ValueError, match=message):
        loaded(tmp_path / "gemma2", ModelConfig(attn_implementation="sdpa"))
