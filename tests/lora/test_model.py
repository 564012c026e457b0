import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from toy import random_ids, toy_model

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
    model, ids = toy_model(), random_ids()
    names = apply_lora(model, EVERYTHING, seed=7)
    assert names == ["embed", "blocks.0.q_proj", "blocks.0.c_proj", "blocks.1.q_proj"]
    kinds = [type(layer) for layer in lora_layers(model).values()]
    assert kinds == [LoraEmbedding, LoraLinear, LoraLinear, LoraLinear]
    assert model.blocks[0].c_proj.transposed
    assert isinstance(model.head, TrainedModule)
    assert torch.equal(model(ids), toy_model()(ids))  # adapted embeddings too: their A is zero
    assert model.head.base.weight is model.embed.weight
    assert model.head.trained.weight is not model.embed.weight
    model(ids).sum().backward()
    assert model.embed.weight.grad is None
    with pytest.raises(ValueError, match="already has adapters"):
        apply_lora(model, EVERYTHING, seed=0)
    empty = toy_model().to("meta")
    apply_lora(empty, EVERYTHING, seed=0)
    assert all(p.is_meta for p in adapter_parameters(empty).values())


def test_rank_zero_leaves_the_model_alone():
    model = toy_model()
    assert apply_lora(model, LoraConfig(lora_dim=0), seed=0) == []
    assert not lora_layers(model)
    assert all(p.requires_grad for p in model.parameters())


def test_what_trains_are_factors_biases_and_saved_modules():
    model = adapted(EVERYTHING)
    factors = ["blocks.0.q_proj", "blocks.0.c_proj", "blocks.1.q_proj"]
    biases = [*factors, "project", "norm", "blocks.0.norm", "blocks.1.norm", "blocks.1.c_proj"]
    assert set(adapter_parameters(model)) == {
        *("embed.lora_embedding_A", "embed.lora_embedding_B", "head.trained.weight"),
        *(f"{name}.lora_{factor}" for name in factors for factor in "AB"),
        *(f"{name}.trained_bias" for name in biases),
    }
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert parameters.keys() == adapter_parameters(model).keys()
    assert all(parameters[name] is p for name, p in adapter_parameters(model).items())
    own = LoraConfig(lora_dim=2, target_modules=("q_proj",), train_bias="lora_only")
    names = [name for name in adapter_parameters(adapted(own)) if name.endswith("bias")]
    assert names == ["blocks.0.q_proj.trained_bias", "blocks.1.q_proj.trained_bias"]
    with pytest.raises(ValueError, match="--train_bias lora_only: no such layer has a bias"):
        adapted(replace(own, target_modules=("embed",)))


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
    trained = model.eval()(ids)
    assert not torch.equal(trained, base(ids))
    with suppress(RuntimeError), adapters_disabled(model):
        with adapters_disabled(model):
            pass
        assert torch.equal(model(ids), base(ids))  # until the outer block ends, even by an error
        raise RuntimeError
    assert torch.equal(model(ids), trained)


def test_init_depends_on_seed_and_name_alone():
    config = LoraConfig(lora_dim=2, target_modules=("embed", "q_proj", "c_proj"))
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    full = adapter_parameters(adapted(config))
    assert torch.equal(torch.rand(1), expected)  # the global state does not advance
    part = adapter_parameters(adapted(replace(config, target_modules=("1.q_proj",))))
    assert torch.equal(full["blocks.1.q_proj.lora_A"], part["blocks.1.q_proj.lora_A"])
    other_seed = adapter_parameters(adapted(config, seed=8))
    assert not torch.equal(full["blocks.1.q_proj.lora_A"], other_seed["blocks.1.q_proj.lora_A"])
    assert not torch.equal(full["blocks.1.q_proj.lora_A"], full["blocks.0.q_proj.lora_A"])


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
    targets = ("embed", "q_proj", "c_proj")
    parameters = adapter_parameters(adapted(LoraConfig(lora_dim=300, target_modules=targets)))
    # q_proj has 6 inputs; c_proj stores its weight as (12 inputs, 6 outputs).
    for name, inputs in {"blocks.0.q_proj": 6, "blocks.0.c_proj": 12}.items():
        a = parameters[f"{name}.lora_A"]
        assert a.shape == (300, inputs)
        assert a.abs().max().item() == pytest.approx(1 / math.sqrt(inputs), rel=0.02)
        assert not parameters[f"{name}.lora_B"].any()
    assert not parameters["embed.lora_embedding_A"].any()
    assert parameters["embed.lora_embedding_B"].std().item() == pytest.approx(1, rel=0.05)


def test_scaling_divides_by_the_rank_or_by_its_root():
    config = LoraConfig(lora_dim=16, lora_alpha=32, lora_dropout=0.25)
    assert lora_scaling(config) == 2
    root = replace(config, use_rslora=True)
    assert lora_scaling(root) == 8
    layers = lora_layers(adapted(root)).values()
    assert {(each.r, each.scaling, each.dropout) for each in layers} == {(16, 8.0, 0.25)}


def test_classic_mode_trains_the_base_but_no_adapted_matrix_nor_what_a_copy_replaces():
    config = LoraConfig(
        lora_dim=2,
        target_modules=("q_proj",),
        train_bias="lora_only",
        modules_to_save=("project", "head"),  # the embedding, which head is tied to, trains on
        only_optimize_lora=False,
    )
    frozen = {name for name, p in adapted(config).named_parameters() if not p.requires_grad}
    layers = ("project.base", "blocks.0.q_proj", "blocks.1.q_proj")
    assert frozen == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}


def test_layout_names_what_is_adapted_in_pefts_words():
    layout = adapter_layout(adapted(EVERYTHING))
    assert layout.target_modules == ["0.c_proj", "embed", "q_proj"]
    assert layout.modules_to_save == ["head"]
    assert layout.fan_in_fan_out
    config = LoraConfig(lora_dim=2, target_modules=("q_proj",))
    assert not adapter_layout(adapted(config)).fan_in_fan_out
