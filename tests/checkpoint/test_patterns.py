"""Adapters with ranks and alphas of single modules, which PEFT itself is the measure of."""

import json

import peft
import pytest
import torch
from torch import nn

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of
from dschat_lora.checkpoint.adapter_config import _config_in_state, read_adapter_config
from dschat_lora.checkpoint.model_card import model_card
from dschat_lora.config.groups import OWN_SETTINGS, LoraConfig
from dschat_lora.lora.merge import merged_state_dict
from dschat_lora.lora.model import apply_lora, lora_layers
from dschat_lora.lora.targets import matching_key
from helpers.tiny import random_ids, randomise, tiny_model, write_trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Endings, whole names, expressions, and keys of which the first counts; PEFT's file sorts them.
PATTERNS = {
    "llama": {
        "target_modules": "all-linear",
        "rank_pattern": {r".*\.0\..*_proj": 2, "layers.1.mlp.down_proj": 1, "q_proj": 5},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 11, "v_proj|o_proj": 0.5},
    },
    "projected_opt": {
        "target_modules": ["embed_tokens", "fc1", "q_proj"],
        "rank_pattern": {"embed_tokens": 2, "fc1": 6},
        "alpha_pattern": {"embed_tokens": 1, "fc1": 9},
        "use_rslora": True,
    },
    "gpt2": {
        "target_modules": ["c_attn", "c_fc"],
        "fan_in_fan_out": True,
        "rank_pattern": {"h.0.attn.c_attn": 4},
        "alpha_pattern": {"c_fc": 2},
    },
}


def of_peft(kind, directory):
    """An adapter with random factors that PEFT saved, in its model."""
    options = peft.LoraConfig(r=3, lora_alpha=7, **PATTERNS[kind])
    theirs = peft.get_peft_model(tiny_model(kind), options).eval()
    randomise(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(directory)
    return theirs


def ours(kind, directory):
    model, config = tiny_model(kind), lora_config_of(directory)
    apply_lora(model, config, seed=0)
    load_adapter(model, directory)
    return model, config


@pytest.mark.parametrize("kind", PATTERNS)
def test_an_adapter_of_peft_is_read_written_merged_and_read_by_peft_again(kind, tmp_path):
    theirs, ids = of_peft(kind, tmp_path / "theirs"), random_ids()
    expected = theirs(ids).logits
    assert (expected - tiny_model(kind)(ids).logits).abs().max() > 0.01
    model, config = ours(kind, tmp_path / "theirs")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)

    merged = tiny_model(kind)
    # An adapted embedding and the head that is tied to it are apart once merged.
    merged.lm_head.weight = nn.Parameter(merged.lm_head.weight.detach().clone())
    merged.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)

    write_trained(tmp_path / "ours", model, config)
    back = peft.PeftModel.from_pretrained(tiny_model(kind), tmp_path / "ours").eval()
    torch.testing.assert_close(back(ids).logits, expected, rtol=1e-5, atol=1e-5)
    again, _ = ours(kind, tmp_path / "ours")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_each_layer_has_the_rank_and_scale_that_peft_gives_it(tmp_path):
    theirs = of_peft("llama", tmp_path)
    model, config = ours("llama", tmp_path)
    found = {name: (layer.r, layer.scaling) for name, layer in lora_layers(model).items()}
    assert found == {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in theirs.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert len(set(found.values())) > 4
    assert OWN_SETTINGS in config.described()
    assert OWN_SETTINGS not in LoraConfig(lora_dim=3).described()


@pytest.mark.parametrize(
    ("pattern", "key", "value", "message"),
    [
        ("rank", "q_proj", 6, r"q_proj\.lora_A must be \(6, n\) for rank 6"),
        ("alpha", "v_proj|o_proj", 8, r"trained with scaling 4 \(lora_alpha 8, r 2,"),
    ],
)
def test_an_adapter_of_another_pattern_does_not_fit(pattern, key, value, message, tmp_path):
    of_peft("llama", tmp_path)
    model, _ = ours("llama", tmp_path)
    plain = tiny_model("llama")
    apply_lora(plain, LoraConfig(lora_dim=3, lora_alpha=7), seed=0)
    shapes = r"down_proj\.lora_A is \(2, 48\), the model has \(3, 48\)"
    with pytest.raises(ValueError, match=shapes):
        load_adapter(plain, tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    fields[f"{pattern}_pattern"][key] = value
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)


def test_a_key_that_cannot_be_matched_is_refused():
    with pytest.raises(ValueError, match="is not a regular expression"):
        matching_key(["q_proj", "*"], "model.k_proj")
    with pytest.raises(ValueError, match="takes more than"):
        matching_key(["(a|a|aa)+b"], "a" * 60)
    assert matching_key(["proj"], "model.q_proj") is None


def test_the_model_card_names_ranks_and_alphas(tmp_path):
    of_peft("projected_opt", tmp_path)
    card = model_card(
        read_adapter_config(tmp_path), title="t", data={}, metrics={}, versions={}, training=None
    )
    assert "| rank of fc1 | 6 |" in card
    assert "| alpha of embed_tokens | 1 |" in card


def test_a_checkpoint_gives_experts_their_own_numbers_and_what_stands_beside_them_the_others():
    experts, router = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.router"
    shapes = {
        **{f"{experts}.lora_A": [8, 2, 16], f"{experts}.lora_B": [8, 16, 2]},
        **{f"{router}.lora_A": [4, 16], f"{router}.lora_B": [8, 4]},
    }
    options = {"lora_dim": 4, "lora_alpha": 8.0, "expert_lora_alpha": 6.0}
    found = _config_in_state(options, "", shapes, task="CAUSAL_LM")
    assert found.rank_pattern == {f"^{experts}": 2}
    assert found.alpha_pattern == {f"^{experts}": 6.0}
    assert found.target_modules == (experts, router)
