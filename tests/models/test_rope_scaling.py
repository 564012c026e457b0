"""``--rope_scaling``: the model that transformers makes of the same configuration."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.models.source import find_model
from dschat_lora.runtime.validation import Inputs, Sources, with_fitting_lengths
from helpers.runs import CARD, NoTokenizer
from helpers.tiny import VOCAB

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
POSITIONS = 64  # of the tiny models
IDS = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def built(path, **options):
    source, lora = find_model(str(path)), LoraConfig(lora_dim=4)
    more = {"dtype": torch.float32, "seed": 1, "meta": False}
    return build_causal_lm(source, NoTokenizer(), ModelConfig(**options), lora, **more)


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [("llama", YARN), ("llama", LLAMA3), ("llama", LINEAR), ("neox", LINEAR), ("neox", YARN)],
)
def test_logits_are_those_of_transformers_with_the_same_configuration(
    model_directory, kind, scaling
):
    path = model_directory(kind)
    stored = AutoConfig.from_pretrained(path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    original = {"original_max_position_embeddings": POSITIONS}
    stored.rope_parameters = {**stored.rope_parameters, **scaling}
    if scaling["rope_type"] != "linear":
        stored.rope_parameters |= original
    stored.max_position_embeddings = 4 * POSITIONS
    expected = logits(AutoModelForCausalLM.from_pretrained(path, config=stored))
    options = ModelConfig(rope_scaling=json.dumps(scaling))
    config = load_config(path, options)
    assert config.max_position_embeddings == 4 * POSITIONS
    model = load_causal_lm(path, config, options, dtype=torch.float32, meta=False)
    assert torch.equal(logits(model), expected)
    assert (logits(plain) - expected).abs().max() > 1e-2


def test_adapter_and_merged_model_bring_the_scaling_along(model_directory, tmp_path):
    path, text = model_directory("llama"), json.dumps(YARN)
    trained = built(path, rope_scaling=text)
    with torch.no_grad():
        for name, parameter in adapter_parameters(trained.model).items():
            parameter.copy_(0.1 * torch.randn_like(parameter)) if "lora_B" in name else None
    expected = logits(trained.model)
    more = {"tokenizer": NoTokenizer(), "card": CARD, "rope_scaling": trained.rope_scaling}
    save_adapter(tmp_path / "adapter", trained.model, trained.lora, base=path, **more)
    again = built(tmp_path / "adapter")
    assert again.rope_scaling == text
    torch.testing.assert_close(logits(again.model), expected, rtol=0.0, atol=1e-6)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["rope_scaling"]) == YARN
    options = {"tokenizer": NoTokenizer(), "dropouts": {}, "max_kl": 1e-6}
    save_merged(tmp_path / "model", trained.model, probe_ids=IDS, **options)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert merged.config.rope_parameters["factor"] == YARN["factor"]
    torch.testing.assert_close(logits(merged), expected, rtol=0.0, atol=1e-4)
    other = json.dumps(YARN | {"factor": 8.0})
    with pytest.raises(ValueError, match=r"^--rope_scaling .*8\.0.* was trained with .*4\.0"):
        built(tmp_path / "adapter", rope_scaling=other)


def test_longer_rows_are_refused_and_told_of_the_scaling_that_reaches_them(model_directory):
    def fitted(kind, *more):
        argv = ["--max_seq_len", "200", *more]
        sources = Sources({"model": find_model(model_directory(kind))})
        config = with_fitting_lengths(parse_config(SupervisedConfig, argv), Inputs(sources, ()))
        return config.data.max_seq_len

    with pytest.raises(ValueError, match="has 64 positions; --rope_scaling .*yarn.*: 4}' reaches"):
        fitted("llama")
    assert fitted("llama", "--rope_scaling", json.dumps(YARN)) == 200
    with pytest.raises(ValueError, match="positions$"):  # learnt ones
        fitted("opt")


@pytest.mark.parametrize(
    ("kind", "scaling", "message"),
    [
        ("opt", YARN, "a opt model has no rotary embeddings"),
        ("llama", {"rope_type": "llama3", "factor": 4.0}, "Missing required keys"),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, "rope_type linear, yarn, llama3"),
        ("llama", {"rope_type": "yarn"}, "a factor in"),
        ("llama", {"rope_type": "yarn", "factor": 0.5}, "a factor in"),
    ],
)
def test_scaling_that_cannot_be_is_refused(model_directory, kind, scaling, message):
    with pytest.raises(ValueError, match=f"--rope_scaling.*{message}"):
        load_config(model_directory(kind), ModelConfig(rope_scaling=json.dumps(scaling)))
