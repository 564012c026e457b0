"""What the stage's own model building sets beside the weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.models.build import build_causal_lm, check_balancing, check_targets
from dschat_lora.models.loading import load_config, load_tokenizer, stored_dropouts
from dschat_lora.models.source import ModelSource, find_model
from fakecuda.captured import tiny
from helpers.step1 import write_adapter_config

SOURCE = find_model(None)


def build(config, lora=LoraConfig(lora_dim=2), meta=False):  # noqa: B008
    tokenizer = load_tokenizer(SOURCE.tokenizer, config)
    return tokenizer, build_causal_lm(
        SOURCE, tokenizer, config, lora, dtype=torch.float32, seed=0, meta=meta
    ).model


def test_chosen_end_of_text_is_where_the_saved_model_stops_too():
    config = ModelConfig(add_eot_token=True, eot_token="?")
    tokenizer, model = build(config)
    assert tokenizer.eos_token == "?"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_larger_tokenizer_is_not_blamed_on_an_end_of_text_token_that_nobody_named():
    """A tokenizer with tokens of its own beyond the model's was blamed on --eot_token."""
    tokenizer = load_tokenizer(SOURCE.tokenizer, ModelConfig())
    rows = len(tokenizer)
    tokenizer.add_tokens(["<tool>", "<call>"])
    options = {"dtype": torch.float32, "seed": 0, "meta": True}
    for own in (ModelConfig(), ModelConfig(add_eot_token=True, eot_token="?")):
        with pytest.raises(ValueError, match="tokenizer has") as refused:
            build_causal_lm(SOURCE, tokenizer, own, LoraConfig(lora_dim=2), **options)
        words = str(refused.value)
        assert f"tokens from {rows} on ('<tool>', ...) have no embedding" in words
        assert "eot_token" not in words


def test_new_token_gets_an_embedding_where_all_weights_train_and_is_refused_elsewhere():
    config = ModelConfig(add_eot_token=True, eot_token="<brand-new>")
    with pytest.raises(ValueError, match="has .* tokens, the model .*a new --eot_token"):
        build(config)
    tokenizer, model = build(config, LoraConfig())
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)


def test_dropout_of_training_is_not_that_of_the_model(tmp_path):
    fields = json.loads((Path(SOURCE.base) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dropout": 0.1}))
    assert stored_dropouts(str(tmp_path), ModelConfig())["dropout"] == 0.1
    _, model = build(ModelConfig(dropout=0.25), meta=True)
    assert model.config.dropout == 0.25


@pytest.mark.parametrize("kind", ["biogpt", "gpt2", "llama", "opt"])
def test_every_dropout_is_off_by_default(kind, tmp_path):
    fields = AutoConfig.for_model(kind).to_dict() | {"attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    loaded = load_config(str(tmp_path), ModelConfig()).to_dict()
    left = {n: loaded[n] for n in fields if "drop" in n and isinstance(fields[n], float)}
    assert left
    assert set(left.values()) == {0.0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts without weights: what is refused is refused before they are read."""
    directory = tmp_path_factory.mktemp("mixture")
    tiny("qwen3_moe").save_pretrained(directory)
    return ModelSource(str(directory))


OF_EXPERTS = [
    ({"expert_lora_dim": 2}, None, "--expert_lora_dim 2"),
    ({"expert_lora_alpha": 3.0}, None, "--expert_lora_alpha 3"),
    ({}, 1e-4, "--expert_learning_rate 0.0001"),
]


@pytest.mark.parametrize(("options", "rate", "named"), OF_EXPERTS)
def test_options_of_experts_are_refused_where_none_is_adapted(mixture, options, rate, named):
    lora = LoraConfig(lora_dim=4, **options)
    check_targets(mixture, ModelConfig(), lora, expert_learning_rate=rate)
    few = replace(lora, target_modules=("q_proj",))
    with pytest.raises(
        ValueError, match=f"^{named} is for experts, but none are among the adapted"
    ):
        check_targets(mixture, ModelConfig(), few, expert_learning_rate=rate)
    with pytest.raises(ValueError, match=f"^{named} is for mixtures of experts"):
        check_targets(SOURCE, ModelConfig(), lora, expert_learning_rate=rate)


def test_options_that_select_other_layers_than_those_of_a_continued_adapter_are_refused(tmp_path):
    source = find_model(str(write_adapter_config(tmp_path / "adapter")))
    source = replace(source, planned=LoraConfig(lora_dim=4, target_modules=("q_proj",)))
    for rule in ({"target_modules": ("q_proj",)}, {"lora_module_name": ".q_"}):
        check_targets(source, ModelConfig(), LoraConfig(lora_dim=4, **rule), given=rule)
    every = LoraConfig(lora_dim=4)
    check_targets(source, ModelConfig(), every)
    words = "--target_modules all-linear selects other layers than the adapter .* has \\(q_proj\\);"
    with pytest.raises(ValueError, match=words):
        check_targets(source, ModelConfig(), every, given={"target_modules"})


def test_balancing_a_model_without_experts_is_refused_before_its_weights_are_read(mixture):
    config = ModelConfig(router_aux_loss_coef=0.1)
    check_balancing(mixture, config)
    check_balancing(SOURCE, ModelConfig())
    with pytest.raises(ValueError, match=r"--router_aux_loss_coef 0\.1: .* has no load-balancing"):
        check_balancing(SOURCE, config)
