"""Factors for some parts of a packed layer, against a loop over its blocks."""

import itertools
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
from dschat_lora.lora.groups import Groups, PackedLoraLinear, groups_of_parts, parts_of
from dschat_lora.lora.layers import draw_keep
from dschat_lora.lora.merge import merged_state_dict
from dschat_lora.lora.model import (
    adapter_layout,
    adapter_parameters,
    adapters_disabled,
    apply_lora,
)
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
    """The layer's output one group after another, and each group's A, B and rows of output."""
    weight = layer.weight.T if layer.transposed else layer.weight
    outputs, blocks = [], []
    row = factor_row = b_row = 0
    for size, enabled in zip(layer.groups.sizes, layer.groups.enabled, strict=True):
        rows = slice(row, row + size)
        y = F.linear(x, weight[rows], layer.bias[rows])
        if enabled:
            a = layer.lora_A[factor_row : factor_row + RANK]
            b = layer.lora_B[b_row : b_row + size]
            y = y + layer.scaling * (x * keep @ a.T) @ b.T
            blocks.append((a, b, rows))
            factor_row, b_row = factor_row + RANK, b_row + size
        outputs.append(y)
        row += size
    return torch.cat(outputs, -1), blocks


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize("enabled", SOME, ids=str)
def test_unequal_groups_compute_what_a_loop_over_the_blocks_does(enabled, transposed):
    layer = packed_layer(UNEQUAL, enabled, transposed=transposed)
    assert layer.lora_A.shape == (sum(enabled) * RANK, IN)
    assert layer.lora_B.shape == (sum(itertools.compress(UNEQUAL, enabled)), RANK)
    x = torch.randn(4, 3, IN, dtype=torch.float64, requires_grad=True)
    expected, _ = by_blocks(layer, x)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, layer.lora_A, layer.lora_B), grad)
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    found = torch.autograd.grad(output, (x, layer.lora_A, layer.lora_B), grad)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_gradients_of_a_group_are_the_formulas_of_its_own_outputs():
    layer = packed_layer(UNEQUAL, (True, False, True))
    x = torch.randn(7, IN, dtype=torch.float64)
    output = layer(x)
    grad = torch.randn_like(output)
    output.backward(grad)
    _, blocks = by_blocks(layer, x)
    s = layer.scaling
    for (a, b, rows), da, db in zip(
        blocks,
        layer.lora_A.grad.split(RANK),
        layer.lora_B.grad.split([5, 3]),
        strict=True,
    ):
        torch.testing.assert_close(db, s * grad[:, rows].T @ (x @ a.T), rtol=0, atol=1e-12)
        torch.testing.assert_close(da, s * (grad[:, rows] @ b).T @ x, rtol=0, atol=1e-12)


def test_dropout_shows_all_groups_the_same_input():
    layer = packed_layer(UNEQUAL, (True, False, True), dropout=0.4).train()
    x = torch.randn(5, IN, dtype=torch.float64)
    torch.manual_seed(3)
    keep = draw_keep(x, 0.4) / 0.6
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), by_blocks(layer, x, keep)[0])


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


def test_groups_that_make_no_layer_are_refused():
    with pytest.raises(ValueError, match=r"one of them True at least, got \[False, False, False\]"):
        Groups(UNEQUAL, (False, False, False))
    with pytest.raises(ValueError, match="packed layer of 3 groups needs as many of enable_lora"):
        Groups(UNEQUAL, (True, False))
    with pytest.raises(ValueError, match=r"must be > 0, got \[4, 0, 4\]"):
        Groups((4, 0, 4), (True, True, True))
    with pytest.raises(ValueError, match=r"12 outputs cannot be cut into \[5, 2, 3\]"):
        PackedLoraLinear(nn.Linear(IN, 12), r=2, scaling=1.0, groups=Groups(UNEQUAL, (True,) * 3))


def test_parts_are_named_in_the_order_of_their_rows():
    groups = groups_of_parts((8, 2, 2), ("v", "q"))
    assert groups == Groups((8, 2, 2), (True, False, True))
    assert parts_of(groups) == ("q", "v")
    assert parts_of(None) == ()


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


def grouped_query():
    """q of 4 heads, k and v of 2, 3 wide."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "hidden_size": 7}
    return packed_model("phi3", "qkv_proj", nn.Linear(7, 24), **sizes)


def parts(*names, target, r=RANK, **options):
    return LoraConfig(lora_dim=r, target_modules=(target,), enable_lora=names, **options)


def test_sizes_come_from_the_heads_of_the_model():
    model = grouped_query()
    assert apply_lora(model, parts("q", "v", target="qkv_proj"), seed=0) == ["h.0.qkv_proj"]
    layer = model["h"][0].qkv_proj
    assert layer.groups == Groups((12, 6, 6), (True, False, True))
    assert adapter_layout(model).groups == layer.groups
    shapes = {name: tuple(p.shape) for name, p in adapter_parameters(model).items()}
    assert shapes == {"h.0.qkv_proj.lora_A": (4, 7), "h.0.qkv_proj.lora_B": (18, 2)}
    assert layer.scaling == 16  # alpha / r, whatever the number of groups
    assert 0.8 / 7**0.5 < layer.lora_A.abs().max() <= 1 / 7**0.5
    assert not layer.lora_B.any()


def test_thirds_without_words_on_keys():
    model = packed_model("gpt2", "c_attn", Conv1D(12, 4), num_attention_heads=2, hidden_size=4)
    apply_lora(model, parts("k", target="c_attn"), seed=0)
    assert model["h"][0].c_attn.groups == Groups((4, 4, 4), (False, True, False))


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (
            lambda: packed_model("gpt2", "c_attn", Conv1D(12, 4), num_attention_heads=2),
            "all-linear",
            "--enable_lora q v: h.0.out of this model (gpt2) does not hold q, k and v one after "
            "another; use --target_modules c_attn",
        ),
        (
            lambda: packed_model("gpt_neox", "query_key_value", nn.Linear(4, 12)),
            "query_key_value",
            "--enable_lora q v: h.0.query_key_value of this model (gpt_neox) does not hold q, k "
            "and v one after another; use it with one of gpt2, mpt, openai-gpt, phi3",
        ),
        (
            lambda: packed_model(
                "gpt2", "c_attn", Conv1D(8, 4), num_attention_heads=2, hidden_size=4
            ),
            "c_attn",
            "--enable_lora q v: h.0.c_attn has 8 outputs, not the 12 of q, k and v of the model's "
            "configuration",
        ),
    ],
    ids=["not packed", "packed by heads", "of another width"],
)
def test_parts_of_other_layers_are_refused(model, target, message):
    with pytest.raises(ValueError, match="--enable_lora") as caught:
        apply_lora(model(), parts("q", "v", target=target), seed=0)
    assert str(caught.value) == message


def test_parts_of_a_divided_model_are_refused():
    model = tiny_model("gpt2")
    divide(model, TensorGroup(None, 0, 2))
    with pytest.raises(ValueError, match="--enable_lora q v is for whole layers, not for"):
        apply_lora(model, parts("q", "v", target="c_attn"), seed=0)


@pytest.fixture
def adapted():
    """GPT-2 with factors for k and v, and ids."""
    model = tiny_model("gpt2").eval()
    apply_lora(model, parts("k", "v", target="c_attn", lora_alpha=4, r=2), seed=0)
    randomise(adapter_parameters(model).values())
    return model, torch.tensor([[3, 5, 8, 13, 21]])


def test_merging_moves_the_rows_of_enabled_parts_alone(adapted):
    model, ids = adapted
    merged = merged_state_dict(model)
    name = "transformer.h.0.attn.c_attn.weight"
    moved = merged[name] - tiny_model("gpt2").state_dict()[name]
    q, k, v = moved.chunk(3, dim=1)
    assert not q.any()
    assert k.any()
    assert v.any()
    torch.testing.assert_close(call_merged(model, merged, ids).logits, model(ids).logits)
    with adapters_disabled(model):
        assert torch.equal(model(ids).logits, tiny_model("gpt2").eval()(ids).logits)


@torch.no_grad()
def test_quick_layers_know_the_parts(adapted):
    model, ids = adapted
    expected = model(ids).logits
    with FastLinears(model).in_use():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_flops_count_the_factors_of_all_parts(adapted):
    plain = tiny_model("gpt2")
    apply_lora(plain, LoraConfig(lora_dim=4, target_modules=("c_attn",)), seed=0)
    parted, whole = describe(adapted[0]), describe(plain)
    assert parted.lora_dim == 4  # 2 parts of rank 2
    assert parted.blocks == whole.blocks
