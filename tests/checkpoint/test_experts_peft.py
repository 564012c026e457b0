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
from dschat_lora.lora.model import adapter_parameters, apply_lora, lora_layers, with_expert_settings
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


def in_peft(base, directory):
    return PeftModel.from_pretrained(copy.deepcopy(base), directory)


def made_by_peft(base, directory, **options):
    """PEFT's model with an adapter of random factors, which it saves to the directory."""
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False} | options
    theirs = get_peft_model(copy.deepcopy(base), PeftConfig(**options))
    theirs.save_pretrained(directory)
    return theirs


def assert_same_logits(model, other):
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", FEW + MORE * ALL)
def test_stock_peft_reads_merges_and_saves_our_adapter(kind, tmp_path):
    base, directory = make_base(kind), tmp_path / "ours"
    ours = write(base, directory, lora_dropout=0.1)  # which PEFT does not have of parameters
    assert (ours(IDS).logits - base(IDS).logits).abs().max() > 0.03
    theirs = in_peft(base, directory)
    assert_same_logits(theirs, ours)
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(read(base, tmp_path / "theirs")(IDS).logits, ours(IDS).logits)
    merged = merged_state_dict(ours)
    for name, tensor in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=2e-6, msg=name)
    back = adapter_parameters(read(base, directory))
    for name, parameter in adapter_parameters(ours).items():
        assert torch.equal(back[name], parameter), name
    # PEFT's names, and one pattern for all experts.
    fields = json.loads((directory / "adapter_config.json").read_text())
    assert {"down_proj", "gate_up_proj"} <= set(fields["target_parameters"])
    assert fields["rank_pattern"] == {"down_proj": 2, "gate_up_proj": 2}
    assert fields["fan_in_fan_out"] is False
    tensors = load_file(directory / "adapter_model.safetensors")
    inner = next(name for name in tensors if name.endswith(".experts.base_layer.lora_B.weight"))
    assert tensors[inner].shape[1] == 2 * 4
    assert tensors[inner.replace("base_layer.lora_B", "lora_A")].shape[0] == 4 * 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # Its dense layers PEFT would take for experts too.
        ("longcat_flash", {}),
        # Whose router is a linear layer, and whose experts are none.
        ("jetmoe", {"target_modules": ("router.layer", "kv_proj")}),
    ],
)
def test_layers_beside_experts_are_the_same_in_peft(kind, options, tmp_path):
    base = make_base(kind)
    ours = write(base, tmp_path, **options)
    names = {name.rpartition(".")[2] for name in lora_layers(ours)}
    assert names >= ({"gate_proj", "up_proj", "down_proj"} if not options else {"layer"})
    assert lora_config_of(tmp_path).expert_lora_dim is None
    assert_same_logits(in_peft(base, tmp_path), ours)
    assert torch.equal(read(base, tmp_path)(IDS).logits, ours(IDS).logits)


def test_an_adapter_that_peft_makes_of_all_linear_layers_is_read(tmp_path):
    """PEFT adapts the router then too, which trains in full here or not at all."""
    base = make_base("qwen3_moe")
    names = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = made_by_peft(base, tmp_path / "few", target_modules=names)
    assert_same_logits(read(base, tmp_path / "few"), theirs)
    made_by_peft(base, tmp_path / "all", target_modules="all-linear")
    with pytest.raises(ValueError, match="mlp.gate"):
        read(base, tmp_path / "all")
    # But those of a type whose routers lie within a module called experts, none of them adapted.
    base = make_base("jetmoe")
    theirs = made_by_peft(base, tmp_path / "routers", target_modules="all-linear")
    ours = read(base, tmp_path / "routers")
    assert any(name.endswith("router.layer") for name in lora_layers(ours))
    assert_same_logits(ours, theirs)


def test_factors_that_do_not_fit_are_refused(tmp_path):
    base = make_base("qwen3_moe")
    write(base, tmp_path, expert_lora_dim=4)
    config = tiny("qwen3_moe")
    config.num_experts = 8
    other = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"\(4, 4, 64\), the model has \(8, 4, 64\)"):
        read(other, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(path.read_text().replace('"r": 4', '"r": 3'))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="rank 3|manifest"):
        read(base, tmp_path)


def test_numbers_of_one_layer_of_experts_stay_its_own(tmp_path):
    base, names = make_base("qwen3_moe"), ["gate_up_proj", "down_proj"]
    own = "layers.1.mlp.experts.down_proj"
    options = {"rank_pattern": {own: 3}, "alpha_pattern": {own: 40}, "target_modules": []}
    theirs = made_by_peft(base, tmp_path / "theirs", target_parameters=names, **options)
    ours, config = read(base, tmp_path / "theirs"), lora_config_of(tmp_path / "theirs")
    write_trained(tmp_path / "ours", ours, config)
    assert_same_logits(in_peft(base, tmp_path / "ours"), theirs)


def test_buffers_of_a_router_that_trains_are_stored_beside_it(tmp_path):
    base = make_base("glm4_moe")
    for name, buffer in base.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(0, 0.1, len(buffer)))
    ours = write(base, tmp_path / "ours", modules_to_save=("mlp.gate",))
    theirs = in_peft(base, tmp_path / "ours")
    assert_same_logits(theirs, ours)
    theirs.save_pretrained(tmp_path / "theirs")
    back = read(make_base("glm4_moe"), tmp_path / "theirs")
    assert torch.equal(back(IDS).logits, ours(IDS).logits)
