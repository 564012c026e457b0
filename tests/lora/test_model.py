import math

import pytest
import torch
from torch import nn
from toy import random_ids, randomise, toy_model

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.layers import LoraEmbedding, LoraLinear
from dschat_lora.lora.model import (
    adapter_layout,
    adapter_parameters,
    adapters_disabled,
    apply_lora,
    base_names,
    init_lora_,
    lora_layers,
    lora_scaling,
)
from dschat_lora.lora.trained import TrainedModule

EVERYTHING = LoraConfig(
    lora_dim=2,
    lora_dropout=0.1,
    target_modules=("embed", "q_proj", "0.c_proj"),
    train_bias="all",
    modules_to_save=("head",),
)


def adapted(config, dtype=torch.float32, seed=7):
    model = toy_model(dtype)
    apply_lora(model, config, seed=seed)
    return model


def test_every_kind_of_layer_is_replaced_by_its_own():
    model = adapted(EVERYTHING)
    kinds = {name: type(layer) for name, layer in lora_layers(model).items()}
    assert kinds == {
        "embed": LoraEmbedding,
        "blocks.0.q_proj": LoraLinear,
        "blocks.0.c_proj": LoraLinear,
        "blocks.1.q_proj": LoraLinear,
    }
    assert model.blocks[0].c_proj.transposed
    assert isinstance(model.head, TrainedModule)


def test_returns_the_adapted_names():
    assert apply_lora(toy_model(), LoraConfig(lora_dim=2, target_modules=("q_proj",)), seed=0) == [
        "blocks.0.q_proj",
        "blocks.1.q_proj",
    ]


def test_rank_zero_leaves_the_model_alone():
    model = toy_model()
    assert apply_lora(model, LoraConfig(lora_dim=0), seed=0) == []
    assert not lora_layers(model)
    assert all(p.requires_grad for p in model.parameters())


def test_fresh_adapter_of_everything_changes_no_logit():
    # Adapted embeddings too: their A is zero.
    ids = random_ids()
    assert torch.equal(adapted(EVERYTHING)(ids), toy_model()(ids))


def test_only_adapters_train_by_default():
    model = adapted(EVERYTHING)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == adapter_parameters(model).keys()


def test_adapter_parameters_are_factors_biases_and_saved_modules():
    model = adapted(EVERYTHING)
    assert set(adapter_parameters(model)) == {
        "embed.lora_embedding_A",
        "embed.lora_embedding_B",
        "project.trained_bias",
        "blocks.0.norm.trained_bias",
        "blocks.0.q_proj.lora_A",
        "blocks.0.q_proj.lora_B",
        "blocks.0.q_proj.trained_bias",
        "blocks.0.c_proj.lora_A",
        "blocks.0.c_proj.lora_B",
        "blocks.0.c_proj.trained_bias",
        "blocks.1.norm.trained_bias",
        "blocks.1.q_proj.lora_A",
        "blocks.1.q_proj.lora_B",
        "blocks.1.q_proj.trained_bias",
        "blocks.1.c_proj.trained_bias",
        "norm.trained_bias",
        "head.trained.weight",
    }
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is p for name, p in adapter_parameters(model).items())


def test_lora_only_biases_are_those_of_adapted_layers():
    model = adapted(LoraConfig(lora_dim=2, target_modules=("q_proj",), train_bias="lora_only"))
    biases = [name for name in adapter_parameters(model) if name.endswith("bias")]
    assert biases == ["blocks.0.q_proj.trained_bias", "blocks.1.q_proj.trained_bias"]


def test_bias_training_without_any_bias_is_refused():
    config = LoraConfig(lora_dim=2, target_modules=("embed",), train_bias="lora_only")
    with pytest.raises(ValueError, match="--train_bias lora_only: no such layer has a bias"):
        apply_lora(toy_model(), config, seed=0)


def test_adapting_twice_is_refused():
    model = adapted(EVERYTHING)
    with pytest.raises(ValueError, match="already has adapters"):
        apply_lora(model, EVERYTHING, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_is_bit_identical_after_training_everything_and_comes_back_when_disabled(dtype):
    base, model, ids = toy_model(dtype), adapted(EVERYTHING, dtype), random_ids()
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1
    )
    before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(ids).float()
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    for name, parameter in adapter_parameters(model).items():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, before[name]), name
    state, pretrained = model.state_dict(), base.state_dict()
    assert base_names(model).keys() == pretrained.keys()
    for original, name in base_names(model).items():
        assert torch.equal(state[name], pretrained[original]), name
    model.eval()
    assert not torch.equal(model(ids), base(ids))
    with adapters_disabled(model):
        assert torch.equal(model(ids), base(ids))


def test_adapters_come_back_after_disabling_also_after_an_error():
    model, ids = adapted(EVERYTHING), random_ids()
    randomise(adapter_parameters(model).values())
    before = model(ids)
    with pytest.raises(RuntimeError), adapters_disabled(model):
        raise RuntimeError
    assert torch.equal(model(ids), before)


def test_nested_disabling_ends_with_the_outer_block():
    model, ids = adapted(EVERYTHING), random_ids()
    randomise(adapter_parameters(model).values())
    with adapters_disabled(model):
        with adapters_disabled(model):
            pass
        assert torch.equal(model(ids), toy_model()(ids))


def test_training_a_tied_head_in_full_leaves_the_embedding_alone():
    model = adapted(EVERYTHING)
    assert model.head.base.weight is model.embed.weight
    assert model.head.trained.weight is not model.embed.weight
    model(random_ids()).sum().backward()
    assert model.embed.weight.grad is None


def test_init_depends_on_seed_and_name_alone():
    config = LoraConfig(lora_dim=2, target_modules=("embed", "q_proj", "c_proj"))
    torch.manual_seed(1)
    full = adapter_parameters(adapted(config))
    torch.manual_seed(2)
    torch.rand(3)
    part = adapter_parameters(adapted(LoraConfig(lora_dim=2, target_modules=("1.q_proj",))))
    assert torch.equal(full["blocks.1.q_proj.lora_A"], part["blocks.1.q_proj.lora_A"])
    other_seed = adapter_parameters(adapted(config, seed=8))
    assert not torch.equal(full["blocks.1.q_proj.lora_A"], other_seed["blocks.1.q_proj.lora_A"])
    assert not torch.equal(full["blocks.1.q_proj.lora_A"], full["blocks.0.q_proj.lora_A"])


def test_init_does_not_advance_the_global_random_state():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)])})
    torch.manual_seed(1)
    apply_lora(model, LoraConfig(lora_dim=2), seed=0)
    assert torch.equal(torch.rand(1), expected)


def test_init_is_uniform_within_one_over_root_of_the_inputs():
    tensor = torch.empty(64, 400)
    init_lora_(tensor, seed=0, name="x", fan_in=400)
    bound = 1 / 20
    assert tensor.abs().max() <= bound
    assert tensor.abs().max() > 0.999 * bound
    # A uniform variable on (-b, b) has standard deviation b / sqrt(3).
    assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert abs(tensor.mean().item()) < 0.02 * bound


def test_bound_of_a_is_set_by_the_inputs_in_both_layouts_and_b_is_zero():
    # q_proj has 6 inputs; c_proj stores its weight as (12 inputs, 6 outputs).
    parameters = adapter_parameters(adapted(LoraConfig(lora_dim=200)))
    for name, inputs in {"blocks.0.q_proj": 6, "blocks.0.c_proj": 12}.items():
        a = parameters[f"{name}.lora_A"]
        assert a.shape == (200, inputs)
        assert a.abs().max().item() == pytest.approx(1 / math.sqrt(inputs), rel=0.02)
        assert not parameters[f"{name}.lora_B"].any()


def test_embedding_starts_with_a_zero_and_b_normal():
    parameters = adapter_parameters(adapted(LoraConfig(lora_dim=300, target_modules=("embed",))))
    assert not parameters["embed.lora_embedding_A"].any()
    assert parameters["embed.lora_embedding_B"].std().item() == pytest.approx(1, rel=0.05)


def test_scaling_divides_by_the_rank_or_by_its_root():
    assert lora_scaling(LoraConfig(lora_dim=16, lora_alpha=32)) == 2
    assert lora_scaling(LoraConfig(lora_dim=16, lora_alpha=32, use_rslora=True)) == 8
    layer = lora_layers(adapted(LoraConfig(lora_dim=16, use_rslora=True)))["blocks.0.q_proj"]
    assert layer.scaling == 8


def test_settings_reach_the_layers():
    model = adapted(LoraConfig(lora_dim=3, lora_alpha=6, lora_dropout=0.25))
    layers = lora_layers(model).values()
    assert {(each.r, each.scaling, each.dropout) for each in layers} == {(3, 2.0, 0.25)}


def test_meta_model_gets_a_meta_adapter():
    model = toy_model().to("meta")
    apply_lora(model, EVERYTHING, seed=0)
    assert all(p.is_meta for p in adapter_parameters(model).values())


def test_classic_mode_trains_the_base_but_no_adapted_matrix_nor_what_a_copy_replaces():
    config = LoraConfig(
        lora_dim=2,
        target_modules=("q_proj",),
        train_bias="lora_only",
        modules_to_save=("project",),
        only_optimize_lora=False,
    )
    frozen = {name for name, p in adapted(config).named_parameters() if not p.requires_grad}
    assert frozen == {
        "project.base.weight",
        "project.base.bias",
        "blocks.0.q_proj.weight",
        "blocks.1.q_proj.weight",
        "blocks.0.q_proj.bias",
        "blocks.1.q_proj.bias",
    }


def test_classic_mode_still_trains_the_embedding_of_a_tied_head_that_trains_apart():
    config = LoraConfig(lora_dim=2, modules_to_save=("head",), only_optimize_lora=False)
    assert adapted(config).embed.weight.requires_grad


def test_layout_names_what_is_adapted_in_pefts_words():
    layout = adapter_layout(adapted(EVERYTHING))
    assert layout.target_modules == ["0.c_proj", "embed", "q_proj"]
    assert layout.modules_to_save == ["head"]
    assert layout.fan_in_fan_out
    assert not adapter_layout(
        adapted(LoraConfig(lora_dim=2, target_modules=("q_proj",)))
    ).fan_in_fan_out
