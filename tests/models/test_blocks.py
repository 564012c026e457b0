"""Attention by blocks: the states and gradients of a dense mask, and nothing for padding."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.models.blocks import attend_by_blocks, block_sizes
from dschat_lora.models.trunk import Trunk
from helpers.pairs import ragged_pairs
from helpers.tiny import KINDS, ragged_samples, tiny_model

CPU = torch.device("cpu")


def inputs_of(batch):
    names = ("input_ids", "position_ids", "segment_ids", "branch_ids")
    return {name: getattr(batch, name) for name in names if hasattr(batch, name)}


def batches():
    samples = ragged_samples(6)
    pairs = [each.sample() for each in ragged_pairs(4)]
    return {
        "packed": SampleCollator(0)([samples[:3], samples[3:5], samples[5:]]),
        "one a row": SampleCollator(0)([[sample] for sample in samples]),
        "trees": PairCollator(0, "shared")([pairs[:2], pairs[2:]]),
        "separate": PairCollator(0, "separate")([pairs[:1], pairs[1:]]),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["packed", "one a row", "trees", "separate"])
def test_blocks_give_the_states_and_gradients_of_a_dense_mask(kind, name):
    batch = batches()[name]
    real = batch.segment_ids > 0
    weights = torch.randn(real.sum(), 1, generator=torch.Generator().manual_seed(3))
    results = []
    for by_blocks in (True, False):
        model = tiny_model(kind)
        trunk = Trunk(model)
        assert trunk.skips_padding(CPU)
        trunk.by_blocks = by_blocks
        hidden = trunk(**inputs_of(batch))
        (hidden[real] * weights).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append((hidden, gradients))
    (blocks, own), (dense, theirs) = results
    torch.testing.assert_close(blocks[real], dense[real], rtol=1e-5, atol=1e-5)
    assert not blocks[~real].any()
    assert len(own) == len(theirs)
    whole = torch.nn.utils.get_total_norm(theirs)
    for gradient, expected in zip(own, theirs, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * whole


def test_sizes_are_the_tokens_of_each_part_of_each_sample_row_by_row():
    segments = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
    branches = torch.tensor([[0, 1, 2, 0, 0, 0], [0, 0, 1, 1, 1, 2]])
    assert block_sizes(segments, branches).tolist() == [[[[1, 1, 1], [2, 0, 0], [2, 3, 1]]]]
    assert block_sizes(segments, None).tolist() == [[[[3, 0, 0], [2, 0, 0], [6, 0, 0]]]]


def test_samples_of_one_number_in_two_rows_are_two():
    segments = torch.tensor([[1, 1], [1, 1]])
    assert block_sizes(segments, None).tolist() == [[[[2, 0, 0], [2, 0, 0]]]]


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_other_masks_are_left_to_transformers(mask):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(3))
    seen = torch.rand(2, 1, 5, 5, generator=generator) > 0.3
    seen[..., 0] = True
    given = {
        "none": None,
        "boolean": seen,
        "additive": torch.zeros(2, 1, 5, 5).masked_fill(~seen, -1e9),
    }[mask]
    ours, _ = attend_by_blocks(Layer(), query, key, value, given)
    theirs, _ = sdpa_attention_forward(Layer(), query, key, value, given)
    assert torch.equal(ours, theirs)


def test_a_batch_of_nothing_is_computed_under_its_mask():
    model = tiny_model("llama")
    empty = SampleCollator(0).empty()
    hidden = Trunk(model)(**inputs_of(empty))
    assert hidden.shape[:2] == (1, 1)
    assert torch.isfinite(hidden).all()


def test_generation_is_what_it_was():
    model = tiny_model("opt")
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    Trunk(model)
    after = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(before, after)


def test_a_model_under_its_own_mask_computes_its_padding():
    trunk = Trunk(tiny_model("opt"))
    trunk.own_mask = True
    assert not trunk.skips_padding(CPU)
    assert not Trunk(tiny_model("opt")).skips_padding(torch.device("cuda"))
    assert not Trunk(tiny_model("opt").bfloat16()).skips_padding(CPU)
