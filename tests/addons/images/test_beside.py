"""Which layers of composite models are adapted, beside the text model too."""

import peft
import pytest
import torch

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.models.build import attach_media, build_causal_lm
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model
from helpers.composites import save_composite, whole_model
from helpers.rounding import assert_same_sums

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
IDS = torch.arange(3, 83).view(2, 40) * 7 % 500
OPTIONS = ModelConfig()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits


def build(path, **lora):
    source, config = find_model(str(path)), LoraConfig(**{"lora_dim": 4, **lora})
    tokenizer = load_tokenizer(source.tokenizer, OPTIONS)
    return build_causal_lm(
        source, tokenizer, OPTIONS, config, dtype=torch.float32, seed=0, meta=False
    )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save_composite("gemma3", tmp_path_factory.mktemp("gemma") / "base")


def test_an_adapter_of_the_vision_tower_is_loaded_with_it_and_trained_by_no_text(gemma, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    whole = peft.get_peft_model(whole_model(gemma), config)
    whole.peft_config["default"].base_model_name_or_path = str(gemma)
    whole.save_pretrained(tmp_path / "both")
    adapted = build(tmp_path / "both")
    assert adapted.model.rest == ("model.vision_tower", "model.multi_modal_projector")
    name = next(each for each in adapted.targets if "vision_tower" in each)
    theirs, ours = (each.get_submodule(name) for each in (whole.base_model.model, adapted.model))
    assert torch.equal(ours.lora_B, theirs.lora_B["default"].weight)
    assert_same_sums(logits(adapted.model), logits(whole))
    with pytest.raises(
        ValueError, match=r"factors of model\.vision_tower\.\S*q_proj, which text-only rows"
    ):
        attach_media(adapted, None)


def test_names_mean_the_text_model_where_it_has_them(gemma):
    chosen = {
        rule: build(gemma, target_modules=(rule,)).targets
        for rule in ("q_proj", "fc1", "vision_tower.encoder.layers.0.self_attn.q_proj")
    }
    tower = "model.vision_tower"
    within = {rule: {name.startswith(tower) for name in names} for rule, names in chosen.items()}
    assert within == {rule: {rule != "q_proj"} for rule in chosen}
    both = build(gemma, target_modules=(r".*(vision_tower|language_model).*\.q_proj",)).targets
    assert {name.startswith(tower) for name in both} == {False, True}
    text = build(gemma, target_modules=(r"(?!.*vision_tower).*\.q_proj",))
    assert text.targets == chosen["q_proj"]
    assert not text.model.rest
    assert "not loaded" in next(text.facts())
