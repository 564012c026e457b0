"""Models some of whose weights or whose head the files lack are refused, not drawn."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.models.build import build_causal_lm, build_reward_model
from dschat_lora.models.source import find_model
from helpers.runs import NoTokenizer
from helpers.tiny import tiny_model


def damaged(directory, lost):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if lost not in name}
    assert len(kept) < len(tensors)
    save_file(kept, path, metadata={"format": "pt"})


def build(maker, directory):
    source = find_model(str(directory))
    settings = {"dtype": torch.float32, "seed": 0, "meta": False}
    return maker(source, NoTokenizer(), ModelConfig(), LoraConfig(lora_dim=2), **settings)


@pytest.mark.parametrize("maker", [build_causal_lm, build_reward_model])
def test_weights_that_the_files_lack_are_named(maker, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    build(maker, tmp_path)
    damaged(tmp_path, "layers.1.mlp.up_proj")
    with pytest.raises(ValueError, match="the files lack model.layers.1.mlp.up_proj.weight"):
        build(maker, tmp_path)


def test_a_reward_model_without_its_head_gets_no_other(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = build(build_reward_model, tmp_path / "base").model
    model.score = model.score.base
    model.config.architectures = ["LlamaForSequenceClassification"]
    plain = {n: t for n, t in model.state_dict().items() if "lora" not in n}
    model.config.save_pretrained(tmp_path / "base")
    save_file(plain, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    build(build_reward_model, tmp_path / "base")
    damaged(tmp_path / "base", "score")
    with pytest.raises(ValueError, match="is not a reward model: it has no score head"):
        build(build_reward_model, tmp_path / "base")
