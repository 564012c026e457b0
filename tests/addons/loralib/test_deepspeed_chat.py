"""DeepSpeed-Chat's functions on any torch module, against formulas written out, torch and PEFT."""

import copy
import math
from collections import OrderedDict
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


@pytest.mark.parametrize(("r", "alpha"), [(1, 1), (2, 3), (4, 0.5)])
def test_outputs_gradients_and_merged_weights_are_those_of_peft(r, alpha):
    import peft

    options = {"target_modules": ["0", "2"], "lora_dropout": 0.0}
    theirs = peft.get_peft_model(mlp(), peft.LoraConfig(r=r, lora_alpha=alpha, **options))
    ours, x = converted(mlp(), lora_dim=r, lora_scaling=alpha), values(7, 5)
    twins = {
        name: theirs.get_parameter(f"base_model.model.{name}.default.weight")
        for name in factors_of(ours)
    }
    for name, twin in twins.items():
        twin.data = ours.get_parameter(name).detach().clone()
    torch.testing.assert_close(ours(x), theirs(x))
    for model in (ours, theirs):
        model(x).square().sum().backward()
    for name, twin in twins.items():
        torch.testing.assert_close(ours.get_parameter(name).grad, twin.grad)
    assert ours[0].weight.grad is None
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
    adapted = {n: m for n, m in model.named_modules() if isinstance(m, LoraLinear)}
    assert [*adapted] == expected
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [f"{name}.weight" for name in expected]
    if expected == ["heads.wide"]:  # further calls adapt further layers at a rank of their own
        first = model.heads["wide"].lora_A.detach().clone()
        convert_linear_layer_to_lora(model, "narrow", lora_dim=3)
        assert [model.heads[name].r for name in ("wide", "narrow")] == [2, 3]
        assert torch.equal(model.heads["wide"].lora_A, first)


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
    mamba = nn.ModuleDict({"in_proj": nn.Linear(2, 2), "out_proj": nn.Linear(2, 2)})
    mamba.config = SimpleNamespace(model_type="mamba")
    mamba = nn.Sequential(mamba)
    mamba.config = mamba[0].config
    for model, part, message in (
        (nn.Linear(2, 2), "", "part_module_name '': the model has no linear layer"),
        (mamba, "", "'out_proj', whose adapter the GPU kernel of Mamba"),
        (encoder(), "layers.", r"layers\.0\.self_attn\.out_proj, whose weight nn\.Multi"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_linear_layer_to_lora(model, part, lora_dim=1)
    convert_linear_layer_to_lora(mamba, "in_proj", lora_dim=2)


@pytest.mark.parametrize(
    ("part", "settings", "message"),
    [
        (
            "haeds",
            {},
            r"part_module_name 'haeds' matches no linear layer; their names are like 'heads\.wide' "
            "and end in: narrow, wide",
        ),
        ("features", {}, "part_module_name 'features' matches no linear"),
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
    assert not factors_of(convert_linear_layer_to_lora(model, "wide"))  # of rank 0
    assert all(p.requires_grad for p in model.parameters())
    assert convert_lora_to_linear_layer(model) is model


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        *(
            (only_optimize_lora_parameters, {"force_optimize_params": forced}, message)
            for forced, message in (
                (["2.weigth"], "force_optimize_params '2.weigth' is not .* mean '2.weight'"),
                ("0.weight", "force_optimize_params must be a list of names, got the text '0.we"),
                ([], "the model has no LoRA parameters"),
            )
        ),
        *(
            (get_optimizer_grouped_parameters, {"weight_decay": 0.0} | settings, message)
            for settings, message in (
                ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
                ({"lora_lr": -1.0}, "lora_lr must be at least 0, got -1.0"),
                ({"lora_lr": math.nan}, "lora_lr must be at least 0, got nan"),
                ({"no_decay_name_list": "bias"}, "no_decay_name_list must be a list of names"),
            )
        ),
        (
            make_model_gradient_checkpointing_compatible,
            {},
            r"Sequential has no embedding .* requires_grad_\(\)",
        ),
    ],
)
def test_what_would_be_left_out_or_taken_silently_is_refused(function, settings, message):
    model = mlp()
    with pytest.raises(ValueError, match=message):
        function(model, **settings)
    assert all(p.requires_grad for p in model.parameters())


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
    described = [
        (names_in(model, g), {key: g[key] for key in g if key != "params"}) for g in groups
    ]
    assert described == [
        ({"plain.weight", "ln_1.weight"}, {"weight_decay": 0.1}),
        ({"bias_proj.lora_A", "bias_proj.lora_B"}, {"weight_decay": 0.1, "lr": 7e-4}),
        (
            {"bias_proj.bias", "plain.bias", "LayerNorm.weight", "LayerNorm.bias", "ln_1.bias"},
            {"weight_decay": 0.0},
        ),
    ]
    assert sum(len(g["params"]) for g in groups) == 9  # of 10, the frozen weight left out
    named = get_optimizer_grouped_parameters(model, 0.1, no_decay_name_list=["LN_1"])
    assert names_in(model, named[2]) == {"ln_1.weight", "ln_1.bias"}
    (group,) = get_optimizer_grouped_parameters(only_optimize_lora_parameters(model), 0.0)
    assert names_in(model, group) == {"bias_proj.lora_A", "bias_proj.lora_B"}
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


# gradient checkpointing


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", ["embedding", "getter", "transformers"])
def test_checkpointed_blocks_of_a_frozen_model_get_gradients(kind):
    of_transformers = kind == "transformers"
    model = tiny_model("opt").train() if of_transformers else seeded(Checkpointed)
    model = only_optimize_lora_parameters(converted(model, "decoder.l" if of_transformers else ""))
    ids = torch.arange(8)[None] if of_transformers else random_ids()

    def gradients(*more):
        model.zero_grad()
        output = model(ids, *more)
        output = output.logits if of_transformers else output
        if output.requires_grad:
            output.square().sum().backward()
        return {name: p.grad for name, p in factors_of(model).items()}

    expected = gradients(*([] if of_transformers else [False]))
    assert all(grad.abs().sum() > 0 for grad in expected.values())
    if of_transformers:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.disable_input_require_grads()  # which transformers 5 has switched on itself
    kept = [name for name, grad in gradients().items() if grad is not None]
    assert kept == ([] if of_transformers else ["head.lora_A", "head.lora_B"])
    if kind == "getter":
        model.get_input_embeddings = lambda: model.embed
    assert make_model_gradient_checkpointing_compatible(model) is model
    torch.testing.assert_close(gradients(), expected)
    if not of_transformers:
        assert model.embed.weight.grad is None
        model.embed.requires_grad_(True)  # one that trains is left to
        gradients()
        assert model.embed.weight.grad.abs().sum() > 0


# and back


@pytest.mark.parametrize(
    ("make", "shape"),
    [(mlp, (7, 5)), (lambda: seeded(Nested), (7, 4)), (lambda: seeded(ConvNet), (7, 2, 5, 5))],
)
def test_a_trained_model_converted_back_computes_the_same_with_plain_layers(make, shape):
    model, x = make(), values(*shape)
    names, kinds = list(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    convert_linear_layer_to_lora(model, "", lora_dim=2, lora_scaling=4)
    only_optimize_lora_parameters(model)
    optimizer = torch.optim.AdamW(get_optimizer_grouped_parameters(model, 0.1, lora_lr=0.05))
    losses = []
    for _ in range(5):
        losses.append(model(x).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    trained = model(x).detach()
    weights = [m.weight for m in model.modules() if isinstance(m, LoraLinear)]
    training = len(shape) == 2  # plain layers have the mode of the model and the storage of weights
    assert convert_lora_to_linear_layer(model.train(training)) is model
    assert {m.training for m in model.modules()} == {training}
    assert all(
        m.weight is w for m, w in zip(filter(is_linear, model.modules()), weights, strict=True)
    )
    torch.testing.assert_close(model(x), trained, rtol=1e-5, atol=1e-6)
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert list(model.state_dict()) == names


def is_linear(module):
    return isinstance(module, nn.Linear)


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


def test_a_saved_model_whose_head_has_an_update_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model, ids = tiny_model("opt").eval(), torch.arange(8)[None]
    assert model.config.tie_word_embeddings
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    converted(model)
    assert embedding.requires_grad  # it trains on, as the embedding
    expected = model(ids).logits
    convert_lora_to_linear_layer(model).save_pretrained(tmp_path)
    assert torch.equal(embedding, before)
    assert model.lm_head.weight is not embedding
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
    model = converted(toy_model(), "head")
    model.head.weight.ds_id = 1  # as DeepSpeed marks what ZeRO 3 divides
    with pytest.raises(ValueError, match="head has an update, and its weight is another layer's"):
        convert_lora_to_linear_layer(model)


# ZeRO 3


KEPT = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
KEPT = [f"stage3_{each}" for each in (*KEPT, "prefetch_bucket_size")]


def trunk():
    def make():
        layers = [part for _ in range(3) for part in (nn.Linear(24, 24), nn.Tanh())]
        return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers)))

    return seeded(make)


def convert_shards():
    """Elements held whole around it, the output and factors before it, the weights after it."""
    import deepspeed

    from dschat_lora.engine.ds_config import engine_config
    from dschat_lora.engine.zero import gather_to_cpu, gathered

    model = converted(trunk(), "layers.", lora_scaling=4)
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
    base = trunk()
    assert plain.keys() == base.state_dict().keys()
    for n in (0, 2, 4):
        a, b = (factors[f"layers.{n}.lora_{each}"] for each in "AB")
        expected = base.layers[n].weight.detach() + 2 * b @ a
        torch.testing.assert_close(plain[f"layers.{n}.weight"], expected)
    base.load_state_dict(plain)
    torch.testing.assert_close(base(values(5, 24)).detach(), output, rtol=1e-5, atol=1e-6)
