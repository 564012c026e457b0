"""Factors for some parts of a packed layer, against a loop over its blocks."""

import itertools
import re
from types import SimpleNamespace

import loralib
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy import Conv1D, call_merged, randomise

from dschat_lora.config.groups import LoraConfig
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.groups import Groups, PackedLoraLinear, parts_of
from dschat_lora.lora.layers import draw_keep
from dschat_lora.lora.merge import merged_state_dict
from dschat_lora.lora.model import adapter_layout, adapter_parameters, adapters_disabled, apply_lora
from dschat_lora.models.tensor_parallel import divide
from dschat_lora.perf.shape import describe
from helpers.tiny import tiny_model

IN, RANK = 6, 2
UNEQUAL = (5, 2, 3)
SOME = [flags for flags in itertools.product([True, False], repeat=3) if any(flags)]


def packed_layer(sizes, enabled, *, transposed=False, dropout=0.0, dtype=torch.float64):
    """A layer with random factors."""
    torch.manual_seed(0)
    base = Conv1D(sum(sizes), IN) if transposed else nn.Linear(IN, sum(sizes))
    base.to(dtype).requires_grad_(False)
    groups = Groups(sizes, enabled)
    layer = PackedLoraLinear(base, r=RANK, scaling=1.5, dropout=dropout, groups=groups).to(dtype)
    randomise([layer.lora_A, layer.lora_B])
    return layer


def by_blocks(layer, x, keep=1.0):
    """The layer's output, one group after another."""
    weight = layer.weight.T if layer.transposed else layer.weight
    sizes = layer.groups.sizes
    factors = iter(
        zip(layer.lora_A.split(RANK), layer.lora_B.split(layer.groups.enabled_sizes), strict=True)
    )
    outputs = []
    for w, bias, enabled in zip(
        weight.split(sizes), layer.bias.split(sizes), layer.groups.enabled, strict=True
    ):
        y = F.linear(x, w, bias)
        if enabled:
            a, b = next(factors)
            y = y + layer.scaling * (x * keep @ a.T) @ b.T
        outputs.append(y)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("enabled", SOME, ids=str)
def test_unequal_groups_compute_what_a_loop_over_the_blocks_does(enabled, transposed):
    layer = packed_layer(UNEQUAL, enabled, transposed=transposed)
    assert layer.lora_A.shape == (sum(enabled) * RANK, IN)
    assert layer.lora_B.shape == (sum(itertools.compress(UNEQUAL, enabled)), RANK)
    x = torch.randn(4, 3, IN, dtype=torch.float64, requires_grad=True)
    pair = []
    for output in (layer(x), by_blocks(layer, x)):
        leaves = (x, layer.lora_A, layer.lora_B)
        pair.append([output, *torch.autograd.grad(output.sin().sum(), leaves)])
    torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


def test_dropout_shows_all_groups_the_same_input():
    layer = packed_layer(UNEQUAL, (True, False, True), dropout=0.4).train()
    x = torch.randn(5, IN, dtype=torch.float64)
    torch.manual_seed(3)
    keep = draw_keep(x, 0.4) / 0.6
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), by_blocks(layer, x, keep))


def test_a_packed_layer_of_equal_groups_is_loralibs():
    theirs = loralib.MergedLinear(
        IN, 12, r=RANK, lora_alpha=3, enable_lora=[True, False, True], fan_in_fan_out=True
    )
    base = Conv1D(12, IN)
    ours = PackedLoraLinear(
        base, r=RANK, scaling=1.5, groups=Groups((4, 4, 4), (True, False, True))
    )
    randomise([theirs.lora_A, theirs.lora_B])
    names = ours.load_state_dict(theirs.state_dict())
    assert not names.missing_keys
    assert not names.unexpected_keys
    x = torch.randn(3, IN)
    torch.testing.assert_close(ours(x), theirs(x))
    delta = ours.delta(ours.lora_A, ours.lora_B)
    torch.testing.assert_close(delta, 1.5 * theirs.merge_AB())


def test_the_compact_factor_comes_back_from_its_matrix():
    groups = Groups(UNEQUAL, (False, True, True))
    lora_b = torch.arange(10.0).view(5, 2) + 1
    matrix = groups.expand(lora_b)
    assert matrix.tolist() == [
        *[[0, 0, 0, 0]] * 5,
        *([1, 2, 0, 0], [3, 4, 0, 0]),
        *([0, 0, 5, 6], [0, 0, 7, 8], [0, 0, 9, 10]),
    ]
    assert torch.equal(groups.compact(matrix), lora_b)
    matrix[0, 3] = 1e-9
    with pytest.raises(ValueError, match="values other than zero stand outside the blocks of the"):
        groups.compact(matrix)
    with pytest.raises(ValueError, match=r"\(9, 4\) does not fit the groups \[5, 2, 3\], 2 of"):
        groups.compact(matrix[:9])


@pytest.mark.parametrize(
    ("sizes", "enabled", "message"),
    [
        (UNEQUAL, (False,) * 3, r"one of them True at least, got \[False, False, False\]"),
        (UNEQUAL, (True, False), "packed layer of 3 groups needs as many of enable_lora"),
        ((4, 0, 4), (True,) * 3, r"must be > 0, got \[4, 0, 4\]"),
        (UNEQUAL, (True,) * 3, r"12 outputs cannot be cut into \[5, 2, 3\]"),
    ],
)
def test_groups_that_make_no_layer_are_refused(sizes, enabled, message):
    with pytest.raises(ValueError, match=message):
        PackedLoraLinear(nn.Linear(IN, 12), r=2, scaling=1.0, groups=Groups(sizes, enabled))


# ------------------------------------------------------------------------- in a model


class Attention(nn.Module):
    def __init__(self, name, layer):
        super().__init__()
        self.add_module(name, layer)
        self.out = nn.Linear(4, 4)


def packed_model(kind, name, layer, **config):
    model = nn.ModuleDict({"h": nn.ModuleList([Attention(name, layer)])})
    model.config = SimpleNamespace(model_type=kind, **config)
    return model


def divided():
    model = tiny_model("gpt2")
    divide(model, TensorGroup(None, 0, 2))
    return model


def parts(*names, target, r=RANK, **options):
    return LoraConfig(lora_dim=r, target_modules=(target,), enable_lora=names, **options)


def test_sizes_come_from_the_heads_of_the_model():
    """q of 4 heads, k and v of 2, 3 wide; or thirds without words on keys."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "hidden_size": 7}
    model = packed_model("phi3", "qkv_proj", nn.Linear(7, 24), **sizes)
    # Parts are in the order of their rows.
    assert apply_lora(model, parts("v", "q", target="qkv_proj"), seed=0) == ["h.0.qkv_proj"]
    layer = model["h"][0].qkv_proj
    assert layer.groups == Groups((12, 6, 6), (True, False, True))
    assert (parts_of(layer.groups), parts_of(None)) == (("q", "v"), ())
    assert adapter_layout(model).groups == layer.groups
    shapes = {name: tuple(p.shape) for name, p in adapter_parameters(model).items()}
    assert shapes == {"h.0.qkv_proj.lora_A": (4, 7), "h.0.qkv_proj.lora_B": (18, 2)}
    assert layer.scaling == 16  # alpha / r, whatever the number of groups
    assert 0.8 / 7**0.5 < layer.lora_A.abs().max() <= 1 / 7**0.5
    assert not layer.lora_B.any()
    model = packed_model("gpt2", "c_attn", Conv1D(12, 4), num_attention_heads=2, hidden_size=4)
    apply_lora(model, parts("k", target="c_attn"), seed=0)
    assert model["h"][0].c_attn.groups == Groups((4, 4, 4), (False, True, False))


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (
            lambda: packed_model("gpt2", "c_attn", Conv1D(12, 4), num_attention_heads=2),
            "all-linear",
            "--enable_lora q v: h.0.out of this model (gpt2) is not a concatenation of q, k and "
            "v; use --target_modules c_attn",
        ),
        (
            lambda: packed_model("gpt_neox", "query_key_value", nn.Linear(4, 12)),
            "query_key_value",
            "--enable_lora q v: h.0.query_key_value of this model (gpt_neox) is not a "
            "concatenation of q, k and v; use it with one of gpt2, mpt, openai-gpt, phi3",
        ),
        (
            lambda: packed_model(
                "gpt2", "c_attn", Conv1D(8, 4), num_attention_heads=2, hidden_size=4
            ),
            "c_attn",
            "--enable_lora q v: h.0.c_attn has 8 outputs, not the 12 of q, k and v of the model's "
            "configuration",
        ),
        (divided, "c_attn", "--enable_lora q v is not supported with"),
    ],
    ids=["not packed", "packed by heads", "of another width", "divided"],
)
def test_parts_of_other_layers_are_refused(model, target, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        apply_lora(model(), parts("q", "v", target=target), seed=0)


def test_merging_moves_the_rows_of_enabled_parts_alone():
    model, ids = tiny_model("gpt2").eval(), torch.tensor([[3, 5, 8, 13, 21]])
    base = model(ids).logits
    apply_lora(model, parts("k", "v", target="c_attn", lora_alpha=4, r=2), seed=0)
    randomise(adapter_parameters(model).values())
    expected, merged = model(ids).logits, merged_state_dict(model)
    name = "transformer.h.0.attn.c_attn.weight"
    moved = merged[name] - tiny_model("gpt2").state_dict()[name]
    assert [bool(part.any()) for part in moved.chunk(3, dim=1)] == [False, True, True]
    torch.testing.assert_close(call_merged(model, merged, ids).logits, expected)
    with adapters_disabled(model):
        assert torch.equal(model(ids).logits, base)
    with torch.no_grad(), FastLinears(model).in_use():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    plain = tiny_model("gpt2")
    apply_lora(plain, LoraConfig(lora_dim=4, target_modules=("c_attn",)), seed=0)
    parted, whole = describe(model), describe(plain)
    assert parted.lora_dim == 4  # 2 parts of rank 2
    assert parted.blocks == whole.blocks
