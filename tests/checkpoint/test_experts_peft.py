"""Adapters of experts in PEFT's files: stock PEFT loads ours, and we load its own."""

import copy
import json

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.merge import merged_state_dict
from dschat_lora.lora.model import (
    adapter_parameters,
    apply_lora,
    lora_layers,
    with_expert_settings,
)
from fakecuda.captured import tiny
from helpers.spread import ALL
from helpers.tiny import write_trained

IDS = torch.tensor([[5, 9, 11, 3, 7, 8, 200, 41], [6, 4, 300, 2, 77, 15, 16, 400]])
# With shared experts, dense layers or neither, in types whose names PEFT converts and others.
FEW = ("qwen3_moe", "deepseek_v3", "glm4_moe_lite", "gpt_oss")
MORE = (
    *("afmoe", "axk1", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe"),
    *("flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "mellum"),
    *("mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe"),
    *("qwen3_5_moe_text", "qwen3_next", "solar_open"),
)


def make_base(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny(kind)).eval().requires_grad_(False)


def write(base, directory, **options):
    """Our model with a drawn adapter, which is written to the directory."""
    model, config = copy.deepcopy(base), LoraConfig(**{"lora_dim": 4, "lora_alpha": 8, **options})
    targets = apply_lora(model, config, seed=1)
    config = with_expert_settings(model, config, targets)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter_parameters(model).values():
        parameter.data.normal_(0, 0.1, generator=generator)
    write_trained(directory, model, config)
    return model


def read(base, directory):
    model = copy.deepcopy(base)
    apply_lora(model, lora_config_of(directory), seed=3)
    load_adapter(model, directory)
    return model


@pytest.fixture(scope="module", params=FEW + MORE * ALL)
def written(request, tmp_path_factory):
    base = make_base(request.param)
    directory = tmp_path_factory.mktemp("adapter") / request.param
    return base, write(base, directory), directory


def test_stock_peft_has_our_logits(written):
    base, ours, directory = written
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), directory)
    expected = ours(IDS).logits
    assert (expected - base(IDS).logits).abs().max() > 0.03
    torch.testing.assert_close(theirs(IDS).logits, expected, rtol=0, atol=5e-6)


def test_stock_peft_merges_as_we_do(written):
    base, ours, directory = written
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), directory).merge_and_unload()
    merged = merged_state_dict(ours)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=2e-6, msg=name)


def test_what_is_written_is_read_again(written):
    base, ours, directory = written
    back = adapter_parameters(read(base, directory))
    for name, parameter in adapter_parameters(ours).items():
        assert torch.equal(back[name], parameter), name


def test_what_stock_peft_saves_anew_is_the_same_adapter(written, tmp_path):
    base, ours, directory = written
    PeftModel.from_pretrained(copy.deepcopy(base), directory).save_pretrained(tmp_path)
    assert torch.equal(read(base, tmp_path)(IDS).logits, ours(IDS).logits)


def test_layers_beside_experts_that_stay_frozen_are_the_same_in_peft(tmp_path):
    """PEFT would take the dense layers of this type for its experts too."""
    base = make_base("longcat_flash")
    ours = write(base, tmp_path)
    names = {name.rpartition(".")[2] for name in lora_layers(ours)}
    assert {"gate_proj", "up_proj", "down_proj"} <= names
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, rtol=0, atol=5e-6)
    assert torch.equal(read(base, tmp_path)(IDS).logits, ours(IDS).logits)


def test_an_adapter_that_peft_makes_of_all_linear_layers_is_read(tmp_path):
    """PEFT adapts the router then too, which trains in full here or not at all."""
    base = make_base("qwen3_moe")
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
    names = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = get_peft_model(copy.deepcopy(base), PeftConfig(target_modules=names, **options))
    theirs.save_pretrained(tmp_path / "few")
    torch.testing.assert_close(
        read(base, tmp_path / "few")(IDS).logits, theirs(IDS).logits, rtol=0, atol=5e-6
    )
    theirs = get_peft_model(copy.deepcopy(base), PeftConfig(target_modules="all-linear", **options))
    theirs.save_pretrained(tmp_path / "all")
    with pytest.raises(ValueError, match="mlp.gate"):
        read(base, tmp_path / "all")


def test_an_adapter_of_routers_that_peft_makes_is_read(tmp_path):
    """Those of this type lie within a module called experts, none of which is adapted."""
    base = make_base("jetmoe")
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    theirs = get_peft_model(copy.deepcopy(base), PeftConfig(**options))
    theirs.save_pretrained(tmp_path)
    ours = read(base, tmp_path)
    assert any(name.endswith("router.layer") for name in lora_layers(ours))
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=0, atol=5e-6)


def test_the_files_hold_pefts_names_and_one_pattern_for_all_experts(written):
    _, _, directory = written
    fields = json.loads((directory / "adapter_config.json").read_text())
    assert {"down_proj", "gate_up_proj"} <= set(fields["target_parameters"])
    assert fields["rank_pattern"] == {"down_proj": 2, "gate_up_proj": 2}
    tensors = load_file(directory / "adapter_model.safetensors")
    inner = next(name for name in tensors if name.endswith(".experts.base_layer.lora_B.weight"))
    assert tensors[inner].shape[1] == 2 * 4
    assert tensors[inner.replace("base_layer.lora_B", "lora_A")].shape[0] == 4 * 2
    assert fields["fan_in_fan_out"] is False


def test_dropout_is_written_as_none_since_peft_has_none_for_parameters(tmp_path):
    base = make_base("qwen3_moe")
    write(base, tmp_path, lora_dropout=0.1)
    PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)


@pytest.mark.parametrize("kind", ["wrong rank", "of another number of experts"])
def test_factors_that_do_not_fit_are_refused(kind, tmp_path):
    base = make_base("qwen3_moe")
    write(base, tmp_path, expert_lora_dim=4)
    if kind == "wrong rank":
        path = tmp_path / "adapter_config.json"
        path.write_text(path.read_text().replace('"r": 4', '"r": 3'))
        (tmp_path / "manifest.json").unlink()
        with pytest.raises(ValueError, match="rank 3|manifest"):
            read(base, tmp_path)
    else:
        config = tiny("qwen3_moe")
        config.num_experts = 8
        other = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=r"\(4, 4, 64\), the model has \(8, 4, 64\)"):
            read(other, tmp_path)


def test_numbers_of_one_layer_of_experts_stay_its_own(tmp_path):
    base = make_base("qwen3_moe")
    own = {"layers.1.mlp.experts.down_proj": 3}, {"layers.1.mlp.experts.down_proj": 40}
    options = {"rank_pattern": own[0], "alpha_pattern": own[1], "init_lora_weights": False}
    names = ["gate_up_proj", "down_proj"]
    options |= {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": names}
    theirs = get_peft_model(copy.deepcopy(base), PeftConfig(**options))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, config = read(base, tmp_path / "theirs"), lora_config_of(tmp_path / "theirs")
    write_trained(tmp_path / "ours", ours, config)
    back = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    torch.testing.assert_close(back(IDS).logits, theirs(IDS).logits, rtol=0, atol=5e-6)


def test_buffers_of_a_router_that_trains_are_stored_beside_it(tmp_path):
    base = make_base("glm4_moe")
    for name, buffer in base.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0, 0.1, len(buffer)))
    ours = write(base, tmp_path / "ours", modules_to_save=("mlp.gate",))
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, rtol=0, atol=5e-6)
    theirs.save_pretrained(tmp_path / "theirs")
    back = read(make_base("glm4_moe"), tmp_path / "theirs")
    assert torch.equal(back(IDS).logits, ours(IDS).logits)


def test_an_adapter_of_layers_that_only_stand_beside_experts_is_read(tmp_path):
    base = make_base("jetmoe")  # whose router is a linear layer, and whose experts are none
    ours = write(base, tmp_path, target_modules=("router.layer", "kv_proj"))
    assert lora_config_of(tmp_path).expert_lora_dim is None
    assert torch.equal(read(base, tmp_path)(IDS).logits, ours(IDS).logits)
