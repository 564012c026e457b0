"""Weights in NF4: their values, products and gradients, against the paper's table and torch."""

import copy

import pytest
import torch
from bitsandbytes import functional
from torch import nn
from transformers.pytorch_utils import Conv1D

from dschat_lora.lora import nf4
from dschat_lora.lora.layers import (
    LoraLinear,
    full_shape,
    is_quantized,
    state_of,
    stored_bytes,
    value_bytes,
    values_of,
)
from dschat_lora.lora.nf4 import NF4Linear, from_stored, quantize
from dschat_lora.lora.trained import TrainedBias, TrainedModule

# The 16 values of NF4, as arXiv:2305.14314 prints them in appendix E.
TABLE = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def reference(weight, absmax):
    """NF4 of ``weight``, block by block and value by value, with these scales to unpack by."""
    table = torch.tensor(TABLE)
    bounds = (table[1:] + table[:-1]) / 2
    blocks = weight.float().flatten().split(64)
    values = []
    for block, scale in zip(blocks, absmax, strict=True):
        nearest = [int((value > bounds).sum()) for value in block * (1 / block.abs().max())]
        values.append(table[nearest] * scale)
    return torch.cat(values).view(weight.shape)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("worker", [torch.device("cuda", 3), None])
def test_the_given_device_does_the_work(monkeypatch, worker):
    class AskedError(Exception):
        pass

    def ask(matrix, device):
        raise AskedError(device)

    monkeypatch.setattr(nf4, "_packed", ask)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AskedError, match="^cpu$" if worker is None else "^cuda:3$"):
        quantize(drawn(8, 64), dtype=torch.float32, worker=worker)


@pytest.mark.parametrize("shape", [(8, 64), (6, 40), (7, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_are_those_of_the_paper(shape, dtype):
    weight = drawn(*shape, dtype=dtype)
    held = quantize(weight, dtype=dtype)
    expected = reference(weight, state_of(held).absmax())
    # bitsandbytes compiles what reads an odd number of values, which takes 20 seconds.
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(values_of(held), expected.to(dtype))
        assert torch.equal(values_of(held, torch.float32), expected)
    largest = torch.stack([block.abs().max() for block in weight.float().flatten().split(64)])
    torch.testing.assert_close(state_of(held).absmax(), largest, atol=0.02, rtol=0)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_packed_in_pieces_is_what_bitsandbytes_makes_of_the_whole(monkeypatch, transposed):
    """Of 508 blocks, whose scales take two blocks in turn."""
    monkeypatch.setattr(nf4, "PIECE", 4096)
    matrix = drawn(130, 250) * torch.logspace(-2, 1, 130)[:, None]
    held = quantize(
        matrix.t() if transposed else matrix, dtype=torch.float32, transposed=transposed
    )
    codes, state = functional.quantize_4bit(
        matrix, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    expected = functional.dequantize_4bit(codes, state)
    assert torch.equal(held, codes)
    assert torch.equal(values_of(held), expected.t() if transposed else expected)
    stored = {"": codes} | {f".{n}": t for n, t in state.as_dict(packed=True).items()}
    options = {"shape": full_shape(held), "dtype": torch.float32, "transposed": transposed}
    assert torch.equal(values_of(from_stored(stored.get, **options)), values_of(held))
    codes, state = functional.quantize_4bit(matrix, blocksize=64, quant_type="fp4")
    stored = {"": codes} | {f".{n}": t for n, t in state.as_dict(packed=True).items()}
    stored[f".{nf4.STATE_KEY}"] = stored.pop(".quant_state.bitsandbytes__fp4")
    with pytest.raises(ValueError, match="holds fp4 codes"):
        from_stored(stored.get, **options)


def test_a_weight_takes_four_bits_and_an_eighth():
    weight = drawn(512, 512)
    held = quantize(weight, dtype=torch.bfloat16)
    table = 4 * 256 * 8 / weight.numel()  # of the codes of scales, once for each weight
    assert stored_bytes(held) * 8 / weight.numel() == pytest.approx(4.127 + table, abs=1e-3)
    assert value_bytes([held, nn.Parameter(weight)]) == 2 * weight.numel()
    assert full_shape(held) == weight.shape


@pytest.mark.parametrize("shape", [(24, 40), (7, 33)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_shapes_on_the_meta_device_are_those_of_values(transposed, shape):
    weight = drawn(*shape)
    real = quantize(weight, dtype=torch.bfloat16, transposed=transposed)
    empty = quantize(weight.to("meta"), dtype=torch.bfloat16, transposed=transposed)
    assert stored_bytes(empty) == stored_bytes(real)
    assert full_shape(empty) == full_shape(real) == weight.shape


def pair_of_layers(kind, dtype=torch.float32):
    """A layer in NF4, and a plain one of the same values."""
    torch.manual_seed(0)
    plain = (Conv1D(24, 40) if kind == "conv1d" else nn.Linear(40, 24)).to(dtype)
    nn.init.normal_(plain.bias)
    transposed = kind == "conv1d"
    shape = copy.deepcopy(plain).to("meta")
    held = NF4Linear(shape, transposed=transposed, dtype=dtype)
    held.weight = quantize(plain.weight.detach(), dtype=dtype, transposed=transposed)
    held.bias = nn.Parameter(plain.bias.detach().clone())
    with torch.no_grad():
        plain.weight.copy_(values_of(held.weight))
    return held, plain


def outcome(layer, x):
    """Output, and gradients of the input and of what trains."""
    x = x.clone().requires_grad_(True)
    output = layer(x)
    output.backward(drawn(*output.shape, seed=5).to(output.dtype))
    trained = [p.grad for p in layer.parameters() if p.requires_grad]
    return [output.detach(), x.grad, *trained]


def bare(layer):
    layer.requires_grad_(False)
    return layer


def adapted(layer):
    layer = LoraLinear(bare(layer), r=4, scaling=0.5)
    with torch.no_grad():
        layer.lora_A.copy_(drawn(*layer.lora_A.shape, seed=2))
        layer.lora_B.copy_(drawn(*layer.lora_B.shape, seed=3))
    return layer


def disabled(layer):
    layer = adapted(layer).requires_grad_(False)
    layer.enabled = False
    return layer


def with_bias(layer):
    layer = TrainedBias(bare(layer))
    layer.trained_bias = nn.Parameter(drawn(24))
    return layer


WRAPPERS = {"bare": bare, "adapted": adapted, "disabled": disabled, "bias": with_bias}


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_layers_compute_what_they_do_on_the_values(kind, wrap):
    held, plain = pair_of_layers(kind)
    codes, kept = held.weight.detach().clone(), []
    assert (held.in_features, held.out_features) == (40, 24)
    x = drawn(2, 3, 40, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        values = outcome(wrap(held), x)
    # Nothing but codes is kept for the backward pass.
    assert not [t for t in kept if t.shape in ((24, 40), (40, 24)) and t.is_floating_point()]
    for value, expected in zip(values, outcome(wrap(plain), x), strict=True):
        if kind == "linear":
            assert torch.equal(value, expected)
        else:  # the product of a transposed copy
            torch.testing.assert_close(value, expected)
    assert torch.equal(held.weight, codes)


def test_a_layer_trained_in_full_is_a_float32_copy_of_the_values():
    held, _ = pair_of_layers("linear", torch.bfloat16)
    trained = TrainedModule(nn.Sequential(held)).trained
    assert [p.dtype for p in trained.parameters()] == [torch.float32] * 2
    assert torch.equal(trained[0].weight, values_of(held.weight, torch.float32))
    assert not any(is_quantized(p) for p in trained.parameters())
    held, _ = pair_of_layers("conv1d")
    with pytest.raises(ValueError, match="--modules_to_save: a Conv1D layer in 4 bits"):
        TrainedModule(held)
