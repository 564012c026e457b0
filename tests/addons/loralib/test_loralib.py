"""Code written for loralib, run with our layers; loralib itself where it is right."""

import copy
import pickle

import loralib
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dschat_lora.addons.loralib.loralib as lora
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from lora.toy import randomise, toy_model

IN, OUT = 6, 12


def linear(of=lora, **options):
    return of.Linear(IN, OUT, **{"r": 2, "lora_alpha": 3} | options)


def merged_linear(of=lora, flags=(True, False, True), **options):
    settings = {"r": 2, "lora_alpha": 3, "enable_lora": list(flags)} | options
    return of.MergedLinear(IN, OUT, **settings)


def embedding(of=lora, **options):
    return of.Embedding(9, 5, **{"r": 2, "lora_alpha": 3} | options)


def convolution(dims, of=lora, kernel=3, **options):
    return getattr(of, f"Conv{dims}d")(4, 6, kernel, **{"r": 2, "lora_alpha": 3} | options)


FLAGS = [(True,), (True, False), (False, True, True), (True, True, True), (False, False)]
EVERY = {
    **{
        f"linear, transposed {t}": (lambda of=lora, t=t: linear(of, fan_in_fan_out=t))
        for t in (False, True)
    },
    "linear, no bias": lambda of=lora: linear(of, bias=False, fan_in_fan_out=True),
    "embedding": embedding,
    **{
        f"merged {f}, transposed {t}": (
            lambda of=lora, f=f, t=t: merged_linear(of, f, fan_in_fan_out=t)
        )
        for f in FLAGS
        for t in (False, True)
    },
    **{
        f"conv{d}d, kernel {k}, groups {g}": (
            lambda of=lora, d=d, k=k, g=g: convolution(d, of, k, groups=g)
        )
        for d in (1, 2, 3)
        for k in (1, 3)
        for g in (1, 2)
    },
}
UNEQUAL = lambda: merged_linear(  # noqa: E731
    flags=(True, False, True), group_sizes=(7, 2, 3)
)
# Forward passes of loralib that fail: kernels above 1 but in two dimensions; no group enabled.
WRONG_THERE = [
    name for name in EVERY if name.startswith(("conv1d, kernel 3", "conv3d, kernel 3"))
] + [name for name in EVERY if "(False, False)" in name]


def filled(layer):
    randomise([p for name, p in layer.named_parameters() if "lora_" in name])
    return layer


def given(layer):
    """An input for it."""
    generator = torch.Generator().manual_seed(4)
    if "Embedding" in type(layer).__name__:
        return torch.randint(9, (2, 3), generator=generator)
    if "Conv" in type(layer).__name__:
        dims = int(type(layer).__name__[4])
        return torch.randn(2, 4, *[5] * dims, generator=generator)
    return torch.randn(2, 3, IN, generator=generator)


@pytest.mark.parametrize("make", [*EVERY.values(), UNEQUAL], ids=[*EVERY, "unequal"])
def test_training_and_evaluation_compute_what_the_merged_copy_does(make):
    """And each pickles (L8 of loralib's faults: without dropout they could not), and copies."""
    torch.manual_seed(0)
    layer = filled(make())
    before, x = copy.deepcopy(layer.state_dict()), given(layer)
    merged = lora.merged_copy(layer)
    assert list(merged.state_dict()) == [n for n in before if "lora_" not in n]
    for mode in (True, False):
        # L4: they returned nothing.
        ours, theirs = layer.train(mode), merged.train(mode)
        assert ours is layer
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    if "lora_A" in before:
        assert (merged.weight - layer.weight).abs().max() > 0.1
    assert not layer.weight.requires_grad
    for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(other(x), layer(x))
        assert all(a is not b for a, b in zip(other.parameters(), layer.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in EVERY if name not in WRONG_THERE])
@pytest.mark.smoke
def test_a_loralib_checkpoint_computes_the_same_here(name):
    torch.manual_seed(0)
    theirs = filled(EVERY[name](loralib))
    ours = EVERY[name]()
    ours.load_state_dict(theirs.state_dict())
    x = given(ours)
    torch.testing.assert_close(ours(x), theirs(x))
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert shapes == {key: value.shape for key, value in theirs.state_dict().items()}
    if name.startswith("conv"):
        assert isinstance(ours, lora.ConvLoRA)
    assert isinstance(ours, lora.LoRALayer)


@pytest.mark.parametrize(
    "name", ["linear, transposed True", "embedding", "conv2d, kernel 3, groups 1"]
)
def test_the_same_seed_gives_loralibs_initial_values(name):
    torch.manual_seed(5)
    theirs = EVERY[name](loralib).state_dict()
    torch.manual_seed(5)
    ours = EVERY[name]().state_dict()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value)


@pytest.mark.parametrize("make", [linear, merged_linear, lambda: convolution(1)])
def test_at_first_only_b_has_a_gradient_and_after_a_step_a_too(make):
    torch.manual_seed(0)
    layer = make()
    weight = layer.weight.detach().clone()
    x = given(layer)
    trained = [layer.lora_A, layer.lora_B]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        assert layer.lora_A.grad.any() == (step > 0)
        assert layer.lora_B.grad.any()
        optimizer.step()
    assert torch.equal(layer.weight, weight)


class Net(nn.Module):
    def __init__(self, of=lora):
        super().__init__()
        self.embed = embedding(of)
        self.norm = nn.LayerNorm(5)
        self.mix = of.MergedLinear(5, 6, r=2, enable_lora=[True, False, True], fan_in_fan_out=True)
        self.conv = of.Conv2d(1, 2, 3, r=1, padding=1)
        self.head = nn.Linear(6, 3)
        self.register_buffer("bias", torch.ones(4, 4))

    def forward(self, ids):
        x = self.mix(self.norm(self.embed(ids)))
        return self.head(self.conv(x[:, None]).mean(1))


FACTORS = {f"{name}.lora_{factor}" for name in ("embed", "mix", "conv") for factor in "AB"}
BIASES = {
    "none": set(),
    "lora_only": {"mix.bias", "conv.conv.bias"},
    "all": {"norm.bias", "mix.bias", "conv.conv.bias", "head.bias"},
}


@pytest.mark.parametrize("bias", BIASES)
def test_biases_that_are_to_train_get_gradients(bias):
    model = Net()
    state = lora.lora_state_dict(model, bias=bias)
    for function in (lora.mark_only_lora_as_trainable, lora.lora_state_dict):
        with pytest.raises(ValueError, match="bias must be none, all or lora_only, got 'some'"):
            function(model, bias="some")
    assert model.head.weight.requires_grad
    lora.mark_only_lora_as_trainable(model, bias=bias)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == state.keys() == FACTORS | BIASES[bias]
    if bias == "none":
        assert trained == loralib.lora_state_dict(Net(loralib)).keys()
    filled(model)(torch.randint(9, (2, 3))).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


def test_a_whole_model_loads_twice_as_loralib_says_and_merges():
    torch.manual_seed(0)
    trained, ids = filled(Net()).eval(), torch.randint(9, (2, 3))
    base = {name: value for name, value in trained.state_dict().items() if "lora_" not in name}
    again = Net().eval()
    again.load_state_dict(base, strict=False)
    again.load_state_dict(lora.lora_state_dict(trained), strict=False)
    assert torch.equal(again(ids), trained(ids))
    merged = lora.merged_copy(trained)
    assert merged.state_dict().keys() == base.keys()
    torch.testing.assert_close(merged(ids), trained(ids))
    assert isinstance(merged.mix, nn.Linear)


def test_a_tied_weight_is_its_own_in_the_merged_copy():
    model = nn.ModuleDict({"embed": embedding(), "head": nn.Linear(5, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    merged = lora.merged_copy(filled(model))
    assert torch.equal(merged["head"].weight, model["embed"].weight)
    assert not torch.allclose(merged["embed"].weight, model["embed"].weight)
    model = toy_model()
    apply_lora(model, LoraConfig(lora_dim=2), seed=0)
    with pytest.raises(ValueError, match=r"blocks.0.q_proj was adapted by apply_lora: merge it by"):
        lora.merged_copy(model)


@pytest.mark.parametrize(
    "make",
    [linear, merged_linear, embedding, lambda **o: convolution(2, **o)],
    ids=["linear", "merged", "embedding", "conv"],
)
def test_rank_zero_gives_the_plain_layer_which_trains(make):
    layer = make(r=0)
    assert {name.removeprefix("conv.") for name in layer.state_dict()} <= {"weight", "bias"}
    assert all(p.requires_grad for p in layer.parameters())
    x, theirs = given(layer), make(of=loralib, r=0)
    theirs.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), theirs(x))
    layer(x).sum().backward()
    assert layer.weight.grad is not None


def test_groups_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="enable_lora has 5 groups, into which 12 outputs cannot"):
        merged_linear(flags=[True] * 5)
    with pytest.raises(ValueError, match=r"group_sizes \[7, 2\] must be 3 numbers that add up to"):
        merged_linear(group_sizes=(7, 2))
    with pytest.raises(ValueError, match="max_norm rescales its weights"):
        embedding(max_norm=1.0)


# ---------------------------------------------------------- what was wrong in loralib


@pytest.mark.parametrize("name", WRONG_THERE)
def test_l1_and_l2_some_convolutions_and_layers_without_a_group_failed(name):
    layer = EVERY[name](loralib)
    with pytest.raises((RuntimeError, AttributeError), match="shape .* is invalid for|lora_A"):
        layer(given(layer))


def test_l5_what_was_saved_after_evaluation_counted_the_update_twice():
    torch.manual_seed(0)
    ours, theirs = filled(linear()).eval(), filled(linear(loralib))
    theirs.eval()
    x = given(ours)
    wrong, right = linear(loralib), linear()
    wrong.load_state_dict(theirs.state_dict())
    right.load_state_dict(ours.state_dict())
    assert (wrong(x) - theirs(x)).abs().max() > 0.1
    assert torch.equal(right(x), ours(x))


def test_l6_and_l7_a_base_drifted_with_every_evaluation_or_with_factors_loaded_in_it():
    layer = filled(linear(dtype=torch.bfloat16))
    assert layer.lora_A.dtype == torch.float32
    weight = layer.weight.clone()
    for _ in range(10):
        layer.eval()
        layer.load_state_dict(lora.lora_state_dict(filled(linear())), strict=False)
        layer.train()
    assert torch.equal(layer.weight, weight)
    exact = weight.double() + 1.5 * layer.lora_B.double() @ layer.lora_A.double()
    # One rounding, of the sum alone.
    assert torch.equal(lora.merged_copy(layer).weight, exact.to(torch.bfloat16))


def test_l9_convolutions_stood_twice_in_the_state_dict():
    torch.manual_seed(0)
    ours = filled(convolution(2))
    once = ours.state_dict()
    assert once.keys() == convolution(2, loralib).state_dict().keys()
    assert ours.conv.weight is ours.weight
    plain = {name: once[f"conv.{name}"] for name in ("weight", "bias")}
    bare = {name: value for name, value in once.items() if "lora_" in name} | plain
    for stored in (once, once | plain, bare):
        again = nn.ModuleDict({"c": convolution(2)})
        again.load_state_dict({f"c.{name}": value for name, value in stored.items()})
        assert torch.equal(again["c"](given(ours)), ours(given(ours)))
    with pytest.raises(RuntimeError, match="Missing key"):
        convolution(2).load_state_dict({n: v for n, v in once.items() if n != "conv.weight"})


@pytest.mark.parametrize("transposed", [False, True])
def test_the_parts_of_a_merged_update_are_loralibs(transposed):
    options = {"r": 2, "lora_alpha": 6, "enable_lora": [True, False, True]}
    ours, theirs = (
        each.MergedLinear(4, 9, fan_in_fan_out=transposed, **options) for each in (lora, loralib)
    )
    with torch.no_grad():
        theirs.lora_B.normal_()
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.lora_ind, theirs.lora_ind)
    torch.testing.assert_close(ours.merge_AB(), theirs.merge_AB())
    rows = torch.randn(6, 2)
    assert torch.equal(ours.zero_pad(rows), theirs.zero_pad(rows))
    # L3: in loralib's layer without fan_in_fan_out the update was transposed.
    q, v = (a.T @ b.T for a, b in zip(ours.lora_A.split(2), ours.lora_B.split(3), strict=True))
    x = torch.randn(5, 4)
    update = 3.0 * torch.cat([x @ q, x.new_zeros(5, 3), x @ v], -1)
    weight = ours.weight.T if transposed else ours.weight
    torch.testing.assert_close(ours(x), F.linear(x, weight, ours.bias) + update)


def test_every_bias_that_trains_is_saved():
    """Of a layer of rank 0 and of one without enabled groups too."""
    model = nn.ModuleDict(
        {
            "linear": lora.Linear(3, 3, r=1),
            "plain": lora.Linear(3, 3),
            "merged": lora.MergedLinear(3, 4, r=1, enable_lora=[False, False]),
            "conv": lora.Conv1d(1, 1, 1, r=1),
            "head": nn.Linear(3, 3),
        }
    )
    for bias in ("none", "lora_only", "all"):
        lora.mark_only_lora_as_trainable(model, bias=bias)
        trains = {name for name, p in model.named_parameters() if p.requires_grad}
        assert lora.lora_state_dict(model, bias=bias).keys() == trains
        for name, layer in model.items():
            own = {key for key, p in layer.named_parameters() if p.requires_grad}
            assert lora.lora_state_dict(layer, bias=bias).keys() == own, name
