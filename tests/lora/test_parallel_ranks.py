"""Layers, heads and models that two and four processes hold parts of, against whole ones."""

import math
from collections import Counter

import pytest

from helpers.spread import ALL
from helpers.tensor_parallel_layers import CASES, EMBEDDINGS, HEAD_KINDS, HEADS
from helpers.tiny import KINDS

pytestmark = pytest.mark.stage
# Relative, of the largest number of a tensor.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-6}
SIZES = (2, 4) if ALL else (2,)
GATHER, SUM, MAX = ("all_gather", ""), ("all_reduce", "SUM"), ("all_reduce", "MAX")
# Column layers of a block, each of whose A every rank holds; row layers are two.
COLUMNS = {"opt": 4, "gpt2": 2, "neox": 2, "llama": 5, "qwen2": 5}
BLOCKS = 2
HIDDEN = 16 * 32  # numbers in the hidden states of 16 tokens
PREDICTED = 7
# Of A and of B, where the other dimension is that of the hidden states.
FACTORS = ((4, 32), (32, 4))


@pytest.fixture(scope="module")
def reports(ranks):
    """``reports(n)``: what each of n processes found, asked once."""
    done = {}

    def of_size(size):
        if size not in done:
            done[size] = []  # asked for again after a failure, processes would start again
            done[size] = ranks(size).run("helpers.tensor_parallel_layers:report", size=size)
        assert done[size], "the processes failed before"
        return done[size]

    return of_size


PARTS = [*(("layers", name) for name in CASES), *(("embeddings", name) for name in EMBEDDINGS)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("part", "name"), PARTS)
def test_outputs_and_gradients_of_a_divided_layer_are_the_formulas(reports, part, name, size):
    errors = {
        (rank, setting, tensor): (error, tolerance)
        for rank, report in enumerate(reports(size))
        for dtype, tolerance in TOLERANCE.items()
        for setting in (f"{name}, {dtype}", f"{name}, {dtype}, sequence")
        for tensor, error in report[part][setting].items()
    }
    assert errors
    assert not {key: error for key, (error, allowed) in errors.items() if not error <= allowed}


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_what_every_rank_holds_are_summed_in_fp32_beside_16_bit_weights(reports, size):
    for report in reports(size):
        for name, shape in (("column", (3, 12)), ("row", (12, 3))):
            moved = [(*call[:2], tuple(call[2]), call[3]) for call in report["narrow"][name]]
            assert moved == [(*SUM, shape, "torch.float32")]
        dealt = report["narrow"]["row, dealt tokens"]
        moved = {(tuple(shape), kind) for _, operation, shape, kind in dealt if operation == "SUM"}
        assert moved == {((12, 3), "torch.float32"), ((12,), "torch.float32")}


@pytest.mark.parametrize("size", SIZES)
def test_sums_maxima_and_dealt_and_collected_tokens_are_exact(reports, size):
    for report in reports(size):
        assert set(report["tokens"].values()) == {0.0}
        assert report["scattered"] < 1e-6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", HEAD_KINDS)
@pytest.mark.parametrize("name", HEADS)
def test_a_divided_heads_values_and_gradients_are_those_of_all_logits(reports, name, kind, size):
    settings = (f"{name}, {kind}", *([f"{name}, {kind}, sequence"] if kind == "loss" else []))
    for report in reports(size):
        for setting in settings:
            assert max(report["heads"][setting].values()) < 1e-6, setting


MODELS = [
    *((2, kind) for kind in (*KINDS, "llama, vocabulary too")),
    *((4, kind) for kind in ("opt", "gpt2")),
]


@pytest.mark.parametrize(("size", "name"), MODELS)
def test_a_divided_models_loss_and_gradients_with_dropout_are_the_whole_models(reports, name, size):
    for report in reports(size):
        for setting in (name, f"{name}, sequence"):
            errors = report["models"][setting]
            assert max(errors["loss"], errors["gradients"]) < 1e-6, setting


def calls(report, setting, way):
    """How often each kind of exchange moves a factor of a shape, or so many other numbers."""

    def moved(shape):
        # Hidden states come in one leading dimension or in two.
        return tuple(shape) if tuple(shape) in FACTORS else math.prod(shape)

    exchanges = report["models"][setting][way]
    return Counter((name.split("_into")[0], kind, moved(s)) for name, kind, s, _ in exchanges)


@pytest.mark.parametrize(("size", "kind"), [m for m in MODELS if m[1] in KINDS])
def test_a_models_exchanges_forward_are_one_a_row_layer(reports, size, kind):
    # One for the embedding, and two for the softmax of all the head's logits.
    expected = Counter(
        {(*SUM, HIDDEN): 1 + 2 * BLOCKS, (*MAX, PREDICTED): 1, (*SUM, 2 * PREDICTED): 1}
    )
    assert calls(reports(size)[0], kind, "forward") == expected
    # With tokens dealt out those of each region are gathered, and all after the last block.
    gathered = Counter({(*GATHER, HIDDEN // size): 2 * BLOCKS + 1})
    assert calls(reports(size)[0], f"{kind}, sequence", "forward") == expected + gathered


@pytest.mark.parametrize(("size", "kind"), [m for m in MODELS if m[1] in KINDS])
def test_a_models_exchanges_backward_are_one_a_region_and_one_a_factor(reports, size, kind):
    # One for the head. Below the first region nothing trains, nor below the second where it reads
    # the same.
    first = 2 if kind == "neox" else 1
    expected = Counter(
        {
            (*SUM, PREDICTED * 32): 1,
            (*SUM, HIDDEN): 2 * BLOCKS - first,
            (*SUM, (4, 32)): COLUMNS[kind] * BLOCKS,
            (*SUM, (32, 4)): 2 * BLOCKS,
        }
    )
    assert calls(reports(size)[0], kind, "backward") == expected
    # The tokens of each row layer's output gradient are gathered.
    gathered = Counter({(*GATHER, HIDDEN // size): 2 * BLOCKS})
    assert calls(reports(size)[0], f"{kind}, sequence", "backward") == expected + gathered


def test_an_adapted_vocabularys_exchanges_are_those_of_logits_and_factors(reports):
    (report, _), name = reports(2), "llama, vocabulary too"
    logits = (*GATHER, PREDICTED * 31)
    assert calls(report, name, "forward") == Counter({(*SUM, HIDDEN): 5, logits: 1})
    # Logits are formed again; all regions have something that trains below them.
    assert calls(report, name, "backward") == Counter(
        {
            logits: 1,
            (*SUM, PREDICTED * 32): 1,
            (*SUM, HIDDEN): 2 * BLOCKS,
            (*SUM, (4, 32)): COLUMNS["llama"] * BLOCKS + 1,
            (*SUM, (32, 4)): 2 * BLOCKS + 1,
        }
    )


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_makes_the_same_exchanges_in_the_same_order(reports, size):
    first, *others = reports(size)
    for name, found in first["models"].items():
        for way in ("forward", "backward"):
            assert all(report["models"][name][way] == found[way] for report in others), name
