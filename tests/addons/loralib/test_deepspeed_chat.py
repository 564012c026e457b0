"""DeepSpeed-Chat's functions on any torch module, against formulas written out, torch and PEFT."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dschat_lora.addons.loralib.deepspeed_chat import (
    convert_linear_layer_to_lora,
    convert_lora_to_linear_layer,
    get_optimizer_grouped_parameters,
    make_model_gradient_checkpointing_compatible,
    only_optimize_lora_parameters,
)
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.model import apply_lora
from helpers.rounding import assert_same_sums
from helpers.tiny import tiny_model
from lora.toy import VOCAB, WIDTH, Conv1D, random_ids, randomise, toy_model


def seeded(make, *args, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args, **kwargs)


def mlp():
    return seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)))


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def factors_of(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def converted(model, part="", **kwargs):
    """``model`` with random factors, neither of them zero."""
    convert_linear_layer_to_lora(model, part, **({"lora_dim": 2} | kwargs))
    randomise(factors_of(model).values())
    return model


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(2, 4, 3)
        self.heads = nn.ModuleDict({"wide": nn.Linear(4, 6), "narrow": nn.Linear(4, 2)})

    def forward(self, image):
        pooled = self.features(image).relu().mean((2, 3))
        return torch.cat([head(pooled) for head in self.heads.values()], -1)


class Nested(nn.Module):
    """One linear layer under two names, and one of a name that is part of another's."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4)
        self.left = nn.Sequential(shared, nn.Tanh())
        self.right = nn.Sequential(shared, nn.Linear(4, 4, bias=False))

    def forward(self, x):
        return self.right(self.left(x))


class Checkpointed(nn.Module):
    """Two blocks that are computed again in the backward pass, the old way."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, reentrant=True):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if reentrant else block(x)
        return self.head(x.tanh())


# the layer


@pytest.mark.parametrize(("lora_dim", "lora_scaling"), [(1, 1), (2, 3), (4, 0.5)])
def test_output_and_gradients_are_those_of_their_formula_in_their_layout(lora_dim, lora_scaling):
    x, target = values(7, 5), values(7, 3, seed=4)
    model = converted(mlp(), lora_dim=lora_dim, lora_scaling=lora_scaling)

    # y = x W^T + b + (x R L) s with s = lora_scaling / lora_dim, as their layer has it.
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    right = [plain[f"{n}.lora_A"].T.clone().requires_grad_() for n in "02"]
    left = [plain[f"{n}.lora_B"].T.clone().requires_grad_() for n in "02"]
    assert [tuple(r.shape) for r in right] == [(5, lora_dim), (8, lora_dim)]
    assert [tuple(each.shape) for each in left] == [(lora_dim, 8), (lora_dim, 3)]
    hidden = x @ plain["0.weight"].T + plain["0.bias"]
    hidden = (hidden + (x @ right[0] @ left[0]) * (lora_scaling / lora_dim)).tanh()
    expected = hidden @ plain["2.weight"].T + plain["2.bias"]
    expected = expected + (hidden @ right[1] @ left[1]) * (lora_scaling / lora_dim)
    (expected * target).sum().backward()

    output = model(x)
    torch.testing.assert_close(output, expected)
    (output * target).sum().backward()
    for n, each, other in zip("02", right, left, strict=True):
        torch.testing.assert_close(model.get_parameter(f"{n}.lora_A").grad, each.grad.T)
        torch.testing.assert_close(model.get_parameter(f"{n}.lora_B").grad, other.grad.T)
        assert model.get_parameter(f"{n}.weight").grad is None


def test_outputs_gradients_and_merged_weights_are_those_of_peft():
    import peft

    theirs = peft.get_peft_model(
        mlp(), peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0", "2"], lora_dropout=0.0)
    )
    ours = converted(mlp(), lora_scaling=3)
    for n in "02":
        layer = theirs.base_model.model.get_submodule(n)
        layer.lora_A["default"].weight.data = ours.get_parameter(f"{n}.lora_A").detach().clone()
        layer.lora_B["default"].weight.data = ours.get_parameter(f"{n}.lora_B").detach().clone()
    x = values(7, 5)
    torch.testing.assert_close(ours(x), theirs(x))
    ours(x).square().sum().backward()
    theirs(x).square().sum().backward()
    for n in "02":
        layer = theirs.base_model.model.get_submodule(n)
        grad = ours.get_parameter(f"{n}.lora_A").grad
        torch.testing.assert_close(grad, layer.lora_A["default"].weight.grad)
        grad = ours.get_parameter(f"{n}.lora_B").grad
        torch.testing.assert_close(grad, layer.lora_B["default"].weight.grad)
    merged = theirs.merge_and_unload().state_dict()
    torch.testing.assert_close(convert_lora_to_linear_layer(ours).state_dict(), merged)


def test_a_new_layer_is_its_base_and_draws_a_from_the_global_random_state():
    x, base = values(7, 64), seeded(nn.Sequential, nn.Linear(64, 512))
    first, second, third = (copy.deepcopy(base) for _ in range(3))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        convert_linear_layer_to_lora(first, "0", lora_dim=256)
        convert_linear_layer_to_lora(second, "0", lora_dim=256)
        torch.manual_seed(5)
        convert_linear_layer_to_lora(third, "0", lora_dim=256)
    torch.testing.assert_close(first(x), base(x))
    a = first[0].lora_A
    assert torch.equal(a, third[0].lora_A)
    assert not torch.equal(a, second[0].lora_A)
    # U(-b, b) with b = 1/sqrt(64) has the deviation b/sqrt(3).
    assert 0.124 < a.max() <= 0.125
    assert a.std().item() == pytest.approx(0.125 / math.sqrt(3), rel=0.02)
    assert a.dtype == torch.float32


def test_dropout_is_on_the_input_of_the_update_in_training_alone():
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    convert_linear_layer_to_lora(model, "0", lora_dim=1000, lora_scaling=500, lora_dropout=0.25)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].lora_A.copy_(torch.eye(1000))
        model[0].lora_B.copy_(torch.eye(1000))
    x = torch.ones(1, 1000)
    # The update is x / 2: an input is dropped, or divided by the 3/4 that are kept.
    torch.manual_seed(1)
    output = model(x)
    kept = output != 0
    torch.testing.assert_close(output[kept], torch.full_like(output[kept], 0.5 / 0.75))
    assert 0.70 < kept.float().mean() < 0.80
    torch.testing.assert_close(model.eval()(x), x / 2)


# which layers


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("", ["heads.wide", "heads.narrow"]),
        ("heads.", ["heads.wide", "heads.narrow"]),
        ("narrow", ["heads.narrow"]),
        ("ds.w", ["heads.wide"]),
    ],
)
def test_layers_are_chosen_by_part_of_their_name(part, expected):
    model = ConvNet()
    assert convert_linear_layer_to_lora(model, part, lora_dim=2) is model
    assert [n for n, m in model.named_modules() if isinstance(m, LoraLinear)] == expected
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [f"{name}.weight" for name in expected]


def test_a_layer_of_two_names_stays_one_layer():
    model, x = seeded(Nested), values(3, 4)
    base = copy.deepcopy(model)
    converted(model, "left")
    assert model.left[0] is model.right[0]
    layer = model.left[0]
    update = layer.lora_B @ layer.lora_A / 2
    base.left[0].weight = nn.Parameter(base.left[0].weight + update)
    torch.testing.assert_close(model(x), base(x))
    convert_lora_to_linear_layer(model)
    assert model.left[0] is model.right[0]
    torch.testing.assert_close(model(x), base(x))


def test_further_calls_adapt_further_layers_at_a_rank_of_their_own():
    model = convert_linear_layer_to_lora(ConvNet(), "wide", lora_dim=2)
    first = model.heads["wide"].lora_A.detach().clone()
    convert_linear_layer_to_lora(model, "narrow", lora_dim=3)
    assert [model.heads[name].r for name in ("wide", "narrow")] == [2, 3]
    assert torch.equal(model.heads["wide"].lora_A, first)


def test_conv1d_of_transformers_is_adapted_and_comes_back():
    model = tiny_model("gpt2").eval()
    base, ids = copy.deepcopy(model), torch.arange(8)[None]
    kinds = {name: type(m) for name, m in model.named_modules()}
    converted(model, "attn.c_", lora_scaling=3)
    updates = {
        name: 1.5 * (m.lora_B @ m.lora_A).T
        for name, m in model.named_modules()
        if isinstance(m, LoraLinear)
    }
    assert len(updates) == 2 * base.config.n_layer
    for name, update in updates.items():
        base.get_submodule(name).weight.data += update
    torch.testing.assert_close(model(ids).logits, base(ids).logits)
    convert_lora_to_linear_layer(model)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    torch.testing.assert_close(model.state_dict(), base.state_dict())
    torch.testing.assert_close(model(ids).logits, base(ids).logits)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_torchs_encoder_layers_use_the_update_without_gradients_too():
    model, x = converted(seeded(encoder), "linear").eval(), values(2, 3, 8)
    with torch.no_grad():
        fast = model(x)
        for layer in model.layers:
            for linear in (layer.linear1, layer.linear2):
                linear.weight += linear.lora_B @ linear.lora_A / 2
                linear.lora_B.zero_()
        torch.testing.assert_close(fast, model.train()(x))


def test_a_layer_that_is_read_without_being_called_or_has_no_parent_is_refused():
    with pytest.raises(ValueError, match="part_module_name '': the model has no linear layer"):
        convert_linear_layer_to_lora(nn.Linear(2, 2), "", lora_dim=1)
    model = nn.Sequential(nn.ModuleDict({"in_proj": nn.Linear(2, 2), "out_proj": nn.Linear(2, 2)}))
    model.config = SimpleNamespace(model_type="mamba")
    with pytest.raises(ValueError, match="'out_proj', whose adapter the GPU kernel of Mamba"):
        convert_linear_layer_to_lora(model, "", lora_dim=2)
    convert_linear_layer_to_lora(model, "in_proj", lora_dim=2)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.out_proj, whose weight nn\.Multi"):
        convert_linear_layer_to_lora(encoder(), "layers.", lora_dim=2)


def test_a_rank_of_zero_leaves_the_model_as_it_is():
    model = convert_linear_layer_to_lora(mlp(), "0")
    assert not factors_of(model)
    assert all(p.requires_grad for p in model.parameters())
    assert convert_lora_to_linear_layer(model) is model


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (
            "haeds",
            {},
            r"part_module_name 'haeds' is in .* no linear layer; their names are as 'heads\.wide' "
            "and end in: narrow, wide",
        ),
        ("features", {}, "part_module_name 'features' is in the name of no linear"),
        ("wide", {"lora_dim": -1}, "lora_dim must be a whole number from 0 on, got -1"),
        ("wide", {"lora_dim": 2.5}, "lora_dim must be a whole number from 0 on, got 2.5"),
        ("wide", {"lora_scaling": 0}, "lora_scaling must be above 0, got 0"),
        ("wide", {"lora_scaling": math.inf}, "lora_scaling must be above 0, got inf"),
        ("wide", {"lora_dropout": 1.0}, r"lora_dropout must be in \[0, 1\), got 1.0"),
        ("wide", {"lora_dropout": math.nan}, r"lora_dropout must be in \[0, 1\), got nan"),
    ],
)
def test_what_cannot_be_converted_is_said(part, settings, message):
    model = ConvNet()
    with pytest.raises(ValueError, match=message):
        convert_linear_layer_to_lora(model, part, **({"lora_dim": 2} | settings))
    assert not factors_of(model)


# what trains


def trained_names(model, **forced):
    assert only_optimize_lora_parameters(model, **forced) is model
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_factors_and_forced_parameters_alone_train():
    model = convert_linear_layer_to_lora(ConvNet(), "heads", lora_dim=2)
    heads = ("heads.wide", "heads.narrow")
    assert trained_names(model) == {f"{head}.lora_{each}" for head in heads for each in "AB"}
    model = convert_linear_layer_to_lora(ConvNet(), "wide", lora_dim=2).requires_grad_(False)
    names = {"heads.wide.lora_A", "heads.wide.lora_B", "heads.narrow.weight"}
    assert trained_names(model, force_optimize_params=["heads.narrow.weight"]) == names
    # A tied one by either name.
    model = convert_linear_layer_to_lora(toy_model(), "blocks", lora_dim=2)
    assert "embed.weight" in trained_names(model, force_optimize_params=["head.weight"])
    # Layers of theirs, which a script may still hold.
    model = mlp()
    model[0].lora_right_weight = nn.Parameter(torch.zeros(5, 2))
    assert trained_names(model) == {"0.lora_right_weight"}


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        (["2.weigth"], "force_optimize_params '2.weigth' is no .* did you mean '2.weight'"),
        ("0.weight", "force_optimize_params must be a list of names, got the text '0.weight'"),
        ([], "the model has no LoRA parameters"),
    ],
)
def test_freezing_refuses_what_would_be_left_out_and_changes_nothing(forced, message):
    model = mlp()
    with pytest.raises(ValueError, match=message):
        only_optimize_lora_parameters(model, forced)
    assert all(p.requires_grad for p in model.parameters())


# groups


class Named(nn.Module):
    """Names that groups go by, in layers that are adapted and layers that are not."""

    def __init__(self):
        super().__init__()
        self.bias_proj = nn.Linear(4, 4)
        self.plain = nn.Linear(4, 4)
        self.LayerNorm = nn.LayerNorm(4)
        self.ln_1 = nn.LayerNorm(4)

    def forward(self, x):
        return self.ln_1(self.LayerNorm(self.plain(self.bias_proj(x))))


def names_in(model, group):
    own = {id(p): name for name, p in model.named_parameters()}
    return {own[id(p)] for p in group["params"]}


def test_groups_have_each_trained_parameter_once_with_its_rate_and_decay():
    model = convert_linear_layer_to_lora(seeded(Named), "bias_proj", lora_dim=2)
    groups = get_optimizer_grouped_parameters(model, weight_decay=0.1, lora_lr=7e-4)
    found = [(names_in(model, g), {key: g[key] for key in g if key != "params"}) for g in groups]
    assert found == [
        ({"plain.weight", "ln_1.weight"}, {"weight_decay": 0.1}),
        ({"bias_proj.lora_A", "bias_proj.lora_B"}, {"weight_decay": 0.1, "lr": 7e-4}),
        (
            {"bias_proj.bias", "plain.bias", "LayerNorm.weight", "LayerNorm.bias", "ln_1.bias"},
            {"weight_decay": 0.0},
        ),
    ]
    assert sum(len(g["params"]) for g in groups) == 9  # of 10, the frozen weight left out


def test_names_without_decay_can_be_given_and_no_group_is_empty():
    model = Named()
    groups = get_optimizer_grouped_parameters(model, 0.1, no_decay_name_list=["LN_1"])
    assert names_in(model, groups[1]) == {"ln_1.weight", "ln_1.bias"}
    model = only_optimize_lora_parameters(convert_linear_layer_to_lora(mlp(), "0", lora_dim=2))
    (group,) = get_optimizer_grouped_parameters(model, weight_decay=0.0)
    assert names_in(model, group) == {"0.lora_A", "0.lora_B"}
    assert group["lr"] == 5e-4


def test_adamw_moves_factors_at_their_rate_and_decays_what_is_to_decay():
    """AdamW's first step is the rate, against the sign of the gradient, after the decay."""
    model = converted(seeded(Named), "bias_proj")
    groups = get_optimizer_grouped_parameters(model, weight_decay=0.5, lora_lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-12)
    model(values(6, 4)).pow(3).sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        if p.grad is None:
            assert name == "bias_proj.weight"
            continue
        rate = 1e-2 if "lora_" in name else 1e-3
        decays = name in ("plain.weight", "ln_1.weight") or "lora_" in name
        kept = before[name] * (1 - rate * 0.5 * decays)
        clear = p.grad.abs() > 1e-6
        expected = kept - rate * p.grad.sign()
        torch.testing.assert_close(p.detach()[clear], expected[clear])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"lora_lr": -1.0}, "lora_lr must be at least 0, got -1.0"),
        ({"lora_lr": math.nan}, "lora_lr must be at least 0, got nan"),
        ({"no_decay_name_list": "bias"}, "no_decay_name_list must be a list of names"),
    ],
)
def test_groups_refuse_what_an_optimizer_would_take_silently(settings, message):
    with pytest.raises(ValueError, match=message):
        get_optimizer_grouped_parameters(mlp(), **({"weight_decay": 0.0} | settings))


# gradient checkpointing


def factor_gradients(model, *args):
    for p in model.parameters():
        p.grad = None
    model(*args).square().sum().backward()
    return {name: p.grad for name, p in factors_of(model).items()}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("has_getter", [False, True])
def test_checkpointed_blocks_of_a_frozen_model_get_gradients(has_getter):
    model = only_optimize_lora_parameters(converted(seeded(Checkpointed)))
    ids = random_ids()
    expected = factor_gradients(model, ids, False)
    lost = factor_gradients(model, ids)
    assert [name for name, grad in lost.items() if grad is not None] == [
        "head.lora_A",
        "head.lora_B",
    ]
    if has_getter:
        model.get_input_embeddings = lambda: model.embed
    assert make_model_gradient_checkpointing_compatible(model) is model
    torch.testing.assert_close(factor_gradients(model, ids), expected)
    assert all(grad.abs().sum() > 0 for grad in expected.values())
    assert model.embed.weight.grad is None


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointed_blocks_of_a_frozen_transformers_model_get_gradients():
    model = only_optimize_lora_parameters(converted(tiny_model("opt"), "decoder.layers."))
    ids = torch.arange(8)[None]

    def gradients():
        model.zero_grad()
        output = model(ids, labels=ids)
        if output.loss.requires_grad:
            output.loss.backward()
        return {name: p.grad for name, p in factors_of(model).items()}

    model.train()
    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.disable_input_require_grads()  # which transformers 5 has switched on itself
    assert all(grad is None for grad in gradients().values())
    make_model_gradient_checkpointing_compatible(model)
    torch.testing.assert_close(gradients(), expected)


def test_an_embedding_that_trains_is_left_to():
    model = make_model_gradient_checkpointing_compatible(seeded(Checkpointed))
    model(random_ids()).sum().backward()
    assert model.embed.weight.grad.abs().sum() > 0


def test_a_model_without_an_embedding_is_told_what_to_do():
    with pytest.raises(ValueError, match=r"Sequential has no embedding .* requires_grad_\(\)"):
        make_model_gradient_checkpointing_compatible(mlp())


# and back


@pytest.mark.parametrize("make", [mlp, lambda: seeded(Nested), lambda: seeded(ConvNet)])
def test_a_trained_model_converted_back_computes_the_same_with_plain_layers(make):
    model = make()
    shape = (7, 2, 5, 5) if isinstance(model, ConvNet) else (7, 4 if hasattr(model, "left") else 5)
    x, names = values(*shape), list(model.state_dict())
    kinds = {name: type(m) for name, m in model.named_modules()}
    convert_linear_layer_to_lora(model, "", lora_dim=2, lora_scaling=4)
    only_optimize_lora_parameters(model)
    optimizer = torch.optim.AdamW(get_optimizer_grouped_parameters(model, 0.1, lora_lr=0.05))
    losses = []
    for _ in range(5):
        loss = model(x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    trained = model(x).detach()
    assert convert_lora_to_linear_layer(model) is model
    torch.testing.assert_close(model(x), trained, rtol=1e-5, atol=1e-6)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("training", [True, False])
def test_plain_layers_have_the_mode_of_the_model_and_the_storage_of_its_weights(training):
    model = converted(mlp()).train(training)
    weight = model[0].weight
    assert [m.training for m in convert_lora_to_linear_layer(model).modules()] == [training] * 4
    assert model[0].weight is weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_are_rounded_once(dtype):
    model = converted(mlp().to(dtype))
    layer = model[2]
    assert layer.lora_A.dtype == torch.float32
    exact = layer.weight.double() + layer.lora_B.double() @ layer.lora_A.double() / 2
    twice = layer.weight + (layer.lora_B.to(dtype) @ layer.lora_A.to(dtype)) / 2
    convert_lora_to_linear_layer(model)
    assert model[2].weight.dtype == dtype
    assert torch.equal(model[2].weight, exact.to(dtype))
    assert not torch.equal(model[2].weight, twice)


def test_a_head_with_an_update_leaves_its_embedding_alone():
    model, ids = toy_model(), random_ids()
    embedding = model.embed.weight.detach().clone()
    converted(model, "head")
    assert model.embed.weight.requires_grad  # it trains on, as the embedding
    expected = model(ids).detach()
    convert_lora_to_linear_layer(model)
    assert torch.equal(model.embed.weight, embedding)
    assert model.head.weight is not model.embed.weight
    torch.testing.assert_close(model(ids), expected)


def test_a_saved_model_whose_head_has_an_update_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model, ids = tiny_model("opt").eval(), torch.arange(8)[None]
    assert model.config.tie_word_embeddings
    converted(model)
    expected = model(ids).logits
    convert_lora_to_linear_layer(model).save_pretrained(tmp_path)
    assert not model.config.tie_word_embeddings
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, expected)


def test_layers_of_the_stages_convert_too():
    model, ids = toy_model(), random_ids()
    config = LoraConfig(lora_dim=2, train_bias="lora_only", target_modules=("q_proj", "c_proj"))
    apply_lora(model, config, seed=1)
    randomise(p for p in model.parameters() if p.requires_grad)
    expected = model(ids).detach()
    convert_lora_to_linear_layer(model)
    assert isinstance(model.blocks[0].c_proj, Conv1D)
    assert_same_sums(model(ids), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(lora_dim=2, target_modules=("q_proj", "embed")), r"embed \(LoraEmbedding\)"),
        (LoraConfig(lora_dim=2, modules_to_save=("project",)), r"project \(TrainedModule\)"),
    ],
)
def test_other_adapters_are_refused_and_nothing_is_changed(config, message):
    model = toy_model()
    apply_lora(model, config, seed=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=f"{message}.*merged_state_dict"):
        convert_lora_to_linear_layer(model)
    torch.testing.assert_close(dict(model.named_parameters()), before)


def test_a_tied_weight_in_parts_is_refused():
    model = converted(toy_model(), "head")
    model.head.weight.ds_id = 1  # as DeepSpeed marks what ZeRO 3 divides
    with pytest.raises(ValueError, match="head has an update, and its weight is another layer's"):
        convert_lora_to_linear_layer(model)


# ZeRO 3


KEPT = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
KEPT = [f"stage3_{each}" for each in (*KEPT, "prefetch_bucket_size")]


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def convert_shards():
    """Elements held whole around it, the output and factors before it, the weights after it."""
    import deepspeed

    from dschat_lora.engine.ds_config import engine_config
    from dschat_lora.engine.zero import gather_to_cpu, gathered

    model = converted(seeded(Trunk), "layers.", lora_scaling=4)
    only_optimize_lora_parameters(model)
    optimizer = torch.optim.AdamW(get_optimizer_grouped_parameters(model, 0.0, lora_lr=0.05))
    config = engine_config(
        {"zero_optimization": dict.fromkeys(KEPT, 0)},
        zero_stage=3,
        offload=False,
        micro_batch_size=1,
        accumulation_steps=1,
        max_grad_norm=0.0,
        native_dtype=None,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x, target = values(5, 24), values(5, 24, seed=4)
    for _ in range(3):
        engine.backward(F.mse_loss(engine(x), target))
        engine.step()
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    with gathered(list(trained.values())):
        factors = {name: p.detach().clone() for name, p in trained.items()}
    with torch.no_grad():
        before = engine(x).clone()
    sizes = [p.numel() for p in model.parameters()]
    convert_lora_to_linear_layer(engine)
    sizes += [p.numel() for p in model.parameters()]
    plain = gather_to_cpu(dict(engine.module.named_parameters()))
    engine.destroy()
    return sum(sizes), before, factors, plain


@pytest.mark.stage
def test_weights_that_zero_3_divides_take_up_the_update(ranks):
    reports = ranks(2).run("test_deepspeed_chat:convert_shards")
    assert [size for size, *_ in reports] == [0, 0]
    _, output, factors, plain = reports[0]
    base = seeded(Trunk)
    assert plain.keys() == base.state_dict().keys()
    for n, layer in enumerate(base.layers):
        a, b = (factors[f"layers.{n}.lora_{each}"] for each in "AB")
        expected = layer.weight.detach() + 2 * b @ a
        torch.testing.assert_close(plain[f"layers.{n}.weight"], expected)
    base.load_state_dict(plain)
    torch.testing.assert_close(base(values(5, 24)).detach(), output, rtol=1e-5, atol=1e-6)
