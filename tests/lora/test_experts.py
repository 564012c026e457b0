"""Fused experts with factors, against a plain loop over experts and stock PEFT."""

import copy

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.lora import experts
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.lora.experts import LoraExperts, Routing, expert_linear
from dschat_lora.lora.merge import merged_state_dict, untied_by_merge
from dschat_lora.lora.model import (
    adapter_parameters,
    adapters_disabled,
    apply_lora,
    base_names,
    lora_layers,
    with_expert_settings,
)
from dschat_lora.lora.targets import choose_targets, router_names
from fakecuda.captured import tiny
from lora.test_casts import Casts

# Gated; gated, transposed, with biases and gates between outputs; a linear layer as router.
KINDS = ("qwen3_moe", "gpt_oss", "hunyuan_v1_moe")
IDS = torch.tensor([[5, 9, 11, 3, 7, 8, 200, 41], [6, 4, 300, 2, 77, 15, 16, 400]])


def make_base(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.08)
    return model


@pytest.fixture(scope="module", params=KINDS)
def base(request):
    return make_base(request.param)


def adapted(base, **options):
    model = copy.deepcopy(base)
    apply_lora(model, LoraConfig(**{"lora_dim": 4, "lora_alpha": 6, **options}), seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter_parameters(model).values():
        parameter.data.normal_(0, 0.1, generator=generator)
    return model


def by_loop(x, weight, lora_A, lora_B, ends, scaling):  # noqa: N803
    """Rows of each expert times its weight with the update added, one row at a time."""
    rows, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        matrix = weight[expert] + scaling * lora_B[expert] @ lora_A[expert]
        rows += [matrix @ row for row in x[start:end]]
        start = end
    return torch.stack(rows)


def operands(dtype, r=3):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    ends = torch.tensor([2, 2, 7, 9], dtype=torch.int32)  # the second expert has no rows
    x, weight = draw(9, 12), draw(4, 10, 12)
    return [each.requires_grad_() for each in (x, weight, draw(4, r, 12), draw(4, 10, r))], ends


def run(values, ends, transposed):
    x, weight, lora_a, lora_b = values
    stored = weight.transpose(1, 2).contiguous() if transposed else weight
    layer = LoraExperts(nn.Parameter(stored.detach()), r=3, scaling=0.7, transposed=transposed)
    del layer._parameters["weight"], layer._parameters["lora_A"], layer._parameters["lora_B"]
    layer.weight, layer.lora_A, layer.lora_B = stored, lora_a, lora_b
    return layer(x, Routing(torch.empty(0), ends, torch.empty(0), 9))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_output_and_gradients_are_those_of_a_loop_over_experts(kernel, transposed, monkeypatch):
    if not kernel:
        monkeypatch.setattr(experts, "_has_kernel", lambda x: False)
    values, ends = operands(torch.float32)
    output = run(values, ends, transposed)
    expected = by_loop(*values, ends, 0.7)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    ours = torch.autograd.grad(output, values, weights)
    theirs = torch.autograd.grad(expected, values, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert [bool(each.any()) for each in ours[2]] == [True, False, True, True]
    x, weight, lora_a, lora_b = values
    stored = weight.transpose(1, 2) if transposed else weight
    frozen = by_loop(x, weight, lora_a, lora_b, ends, 0.0)
    product = expert_linear(x, stored, ends, transposed=transposed)
    torch.testing.assert_close(product, frozen, rtol=1e-5, atol=1e-5)
    # A rank below a kernel's alignment computes in 16 bits.
    values, _ = operands(torch.bfloat16)
    exact = by_loop(*(value.float() for value in values), ends, 0.7)
    output = run(values, ends, transposed)
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("flows", [True, False])
def test_rows_times_a_gate_are_multiplied_as_their_product(dtype, flows):
    (x, weight, lora_a, lora_b), ends = operands(dtype)
    gate = x.detach().flip(1).requires_grad_(flows)
    x.requires_grad_(flows)
    layer = LoraExperts(nn.Parameter(weight.detach(), requires_grad=False), r=3, scaling=0.7)
    layer.lora_A, layer.lora_B = nn.Parameter(lora_a.detach()), nn.Parameter(lora_b.detach())
    routing = Routing(None, ends, None, 9)
    leaves = [*([x, gate] if flows else []), layer.lora_A, layer.lora_B]
    for layer.enabled in (True, False) if flows else (True,):
        pair = []
        for given in ((x, routing, gate), (nn.functional.silu(gate) * x, routing)):
            output = layer(*given)
            grads = torch.autograd.grad(output.square().sum(), leaves, materialize_grads=True)
            pair.append([output, *grads])
        torch.testing.assert_close(*pair)


def test_decoding_casts_the_factors_of_experts_once(base):
    names = ("experts.gate_up_proj", "experts.down_proj")
    model = adapted(base, target_modules=names).bfloat16()
    for parameter in adapter_parameters(model).values():
        parameter.data = parameter.data.float()
    shapes = {p.shape for p in adapter_parameters(model).values() if p.dim() == 3}

    # A rank of 2 is brought to what a grouped product takes as it is, of 16 bytes.
    with FactorCasts(model).in_use():
        for layer in filter(lambda each: each.casts, lora_layers(model).values()):
            down, up = layer.casts
            rank = 8 if experts._has_kernel(down) else 2
            assert (down.shape[1], up.shape[2]) == (rank, rank)
            assert not down[:, 2:].any()
            assert not up[..., 2:].any()
    assert all(layer.casts is None for layer in lora_layers(model).values())

    def logits():
        with torch.no_grad(), Casts(shapes) as seen:
            return model(IDS).logits, seen.count

    expected, many = logits()
    with FastLinears(model).in_use():
        found, none = logits()
    assert (many > 0, none) == (bool(shapes), 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(layer.casts is None for layer in lora_layers(model).values())


def test_all_linear_takes_experts_and_leaves_routers(base):
    """Their rank is that of other layers over the experts of a token."""
    model, config = copy.deepcopy(base), LoraConfig(lora_dim=9)
    settings = with_expert_settings(base, config, apply_lora(model, config, seed=3))
    layers = lora_layers(model)
    fused = [name for name, m in layers.items() if isinstance(m, LoraExperts)]
    assert [name.rpartition(".")[2] for name in fused] == 2 * ["gate_up_proj", "down_proj"]
    assert not layers.keys() & {f"model.layers.{i}.mlp.gate.wg" for i in range(2)}
    if base.config.model_type == "hunyuan_v1_moe":
        assert len(router_names(base)) == 2
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(adapter_parameters(model))
    assert base.config.num_experts_per_tok == 2
    for name, layer in layers.items():
        assert settings.of_module(name).lora_dim == (4 if name in fused else 9)
        assert not layer.lora_B.any()
        assert 0.9 < layer.in_features**0.5 * layer.lora_A.abs().max() <= 1
    assert "experts r 4" in settings.described()


def empty(kind):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny(kind))


@pytest.mark.parametrize(
    ("kind", "router"),
    [
        ("longcat_flash", "mlp.router.classifier"),
        ("jetmoe", "self_attention.experts.router.layer"),
        ("zaya", "mlp.gate.router_mlp.fc1"),
    ],
)
def test_routers_stay_frozen_unless_they_are_named(kind, router):
    base, name = empty(kind), f"model.layers.0.{router}"
    assert name in router_names(base)
    assert not set(choose_targets(base, LoraConfig(lora_dim=4))) & router_names(base)
    assert name in choose_targets(base, LoraConfig(lora_dim=4, target_modules=(router,)))


def test_a_fresh_adapter_changes_nothing_and_a_disabled_one_is_the_base(base):
    expected = base(IDS).logits
    fresh = copy.deepcopy(base)
    apply_lora(fresh, LoraConfig(lora_dim=4), seed=3)
    torch.testing.assert_close(fresh(IDS).logits, expected, rtol=0, atol=2e-6)
    model = adapted(base)
    assert (model(IDS).logits - expected).abs().max() > 0.05
    with adapters_disabled(model):
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=2e-6)


def test_merged_weights_are_those_with_the_update_of_every_expert(base):
    model = adapted(base)
    merged = merged_state_dict(model)
    assert merged.keys() == base.state_dict().keys()
    layer = lora_layers(model)["model.layers.1.mlp.experts.gate_up_proj"]
    before = base.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(4):
        update = 3.0 * layer.lora_B[expert] @ layer.lora_A[expert]  # alpha 6 over rank 2
        update = update.T if layer.transposed else update
        after = merged["model.layers.1.mlp.experts.gate_up_proj"][expert]
        torch.testing.assert_close(after, before[expert] + update, rtol=0, atol=1e-6)
    whole = copy.deepcopy(base)
    whole.load_state_dict(merged)
    torch.testing.assert_close(whole(IDS).logits, model(IDS).logits, rtol=0, atol=2e-5)
    assert untied_by_merge(model) == []
    assert set(base_names(model)) == set(base.state_dict())


def flat(name, parameter):
    """A factor as PEFT has it."""
    value = parameter.detach()
    if parameter.ndim == 2:
        return value
    return value.flatten(0, 1) if name.endswith("A") else value.permute(1, 2, 0).flatten(1)


def test_three_steps_are_pefts(base):
    """The same factors at the start, batches and AdamW: equal losses and factors after it."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    fused = ("experts.gate_up_proj", "experts.down_proj")
    ours = copy.deepcopy(base)
    config = LoraConfig(4, 6, expert_lora_dim=4, target_modules=attention + fused)
    apply_lora(ours, config, seed=1)
    theirs = get_peft_model(
        copy.deepcopy(base),
        PeftConfig(r=4, lora_alpha=6, target_modules=attention, target_parameters=fused),
    )
    twins = {}
    for name, parameter in adapter_parameters(ours).items():
        layer, _, factor = name.rpartition(".")
        owner, _, weight = layer.rpartition(".")
        if parameter.ndim == 3:
            layer = f"{owner}.base_layer" if weight == "gate_up_proj" else owner
        twins[name] = theirs.get_parameter(f"base_model.model.{layer}.{factor}.default.weight")
        twins[name].data.copy_(flat(name, parameter))
    for model in (ours, theirs):
        model.train()
    parameters = adapter_parameters(ours)
    optimizers = [
        torch.optim.AdamW(each, lr=5e-3) for each in (parameters.values(), twins.values())
    ]
    for step in range(3):
        ids = torch.randint(3, 1000, (2, 9), generator=torch.Generator().manual_seed(step))
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    for name, parameter in parameters.items():
        # AdamW divides by gradients near zero.
        assert (flat(name, parameter) - twins[name]).norm() < 1e-4 * parameter.norm(), name


FROZEN = {"expert_lora_dim": 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (FROZEN, ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ({"target_modules": ("q_proj", "experts.down_proj")}, ["down_proj", "q_proj"]),
        # as the weights of one expert are called
        ({"target_modules": ("experts.up_proj",)}, ["gate_up_proj"]),
        ({"lora_module_name": "experts"}, ["down_proj", "gate_up_proj"]),
        (FROZEN | {"target_modules": ("experts.down_proj",)}, "--target_modules 'experts.down_"),
        (FROZEN | {"target_modules": ("q_proj", "up_proj")}, "--target_modules 'up_proj'"),
        (FROZEN | {"lora_module_name": "experts"}, "--lora_module_name 'experts'"),
    ],
    ids=str,
)
def test_options_choose_experts_and_do_not_name_those_that_stay_frozen(options, expected):
    base, config = empty("qwen3_moe"), LoraConfig(lora_dim=4, **options)
    if isinstance(expected, list):
        targets = choose_targets(base, config)
        assert sorted({name.rpartition(".")[2] for name in targets}) == expected
        return
    words = f"^{expected}.* matches experts, but --expert_lora_dim 0 leaves"
    with pytest.raises(ValueError, match=words):
        choose_targets(base, config)


def test_a_router_trains_in_full_where_it_is_asked_for():
    model = adapted(make_base("qwen3_moe"), modules_to_save=("mlp.gate",))
    assert model(IDS).logits.shape == (2, 8, 1024)
    router = adapter_parameters(model)["model.layers.0.mlp.gate.trained.weight"]
    assert torch.equal(merged_state_dict(model)["model.layers.0.mlp.gate.weight"], router)
