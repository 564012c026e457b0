"""What the start-up says of adapters that stock PEFT would load only in part."""

import copy

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.lora.model import adapter_parameters, apply_lora, with_expert_settings
from dschat_lora.models.build import AdaptedModel, peft_warning
from dschat_lora.models.loading import load_causal_lm, load_config
from fakecuda.captured import tiny
from helpers.composites import save_composite
from helpers.tiny import write_trained

IDS = torch.tensor([[5, 9, 11, 3, 7, 8, 200, 41]])
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapted(kind, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(kind)).eval()
    config = LoraConfig(lora_dim=4, **options)
    targets = apply_lora(model, config, seed=0)
    return AdaptedModel(model, with_expert_settings(model, config, targets), targets)


def in_peft(ours, directory):
    """Logits of the adapter in stock PEFT, and here."""
    for name, parameter in adapter_parameters(ours.model).items():
        generator = torch.Generator().manual_seed(len(name))
        parameter.data.normal_(0, 0.1, generator=generator)
    write_trained(directory, ours.model, ours.lora)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(tiny(ours.model.config.model_type)).eval()
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), directory)
    with torch.no_grad():
        return theirs(IDS).logits, ours.model(IDS).logits


@pytest.mark.filterwarnings("ignore")
def test_layers_that_transformers_renames_are_named_in_a_warning(tmp_path):
    ours = adapted("laguna")
    (line,) = ours.facts()
    assert line.startswith("warning      stock PEFT drops the factors of 3 layers such as model.")
    assert ".mlp.shared_experts.gate_proj, which" in line
    theirs, expected = in_peft(ours, tmp_path)
    assert (theirs - expected).abs().max() > 1e-3


def test_of_a_composite_model_its_own_renamings_count(tmp_path):
    base, options = str(save_composite("inkling2", tmp_path)), ModelConfig()
    config = load_config(base, options)
    model = load_causal_lm(base, config, options, dtype=torch.float32, meta=False)
    apply_lora(model, LoraConfig(lora_dim=4), seed=0)
    assert "of 2 layers such as model.language_model.layers.1." in peft_warning(model)


@pytest.mark.parametrize(
    "kind", ["laguna", "qwen3_moe", "gpt_oss", "longcat_flash", "llama", "minimax_m3_vl_text"]
)
def test_nothing_is_said_where_peft_has_every_factor(kind, tmp_path):
    ours = adapted(kind, target_modules=ATTENTION if kind == "laguna" else ("all-linear",))
    assert not list(ours.facts())
    theirs, expected = in_peft(ours, tmp_path)
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)
