"""Packed rows of models whose layers carry a state, against stock transformers on each sample."""

import pytest
import torch
from torch import nn

from dschat_lora.algos.segments import make_spans
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.samples import SequenceSample
from dschat_lora.models.architecture_checks import check_architecture
from dschat_lora.models.backbone import Backbone, recurrent_layers
from dschat_lora.models.blocks import recompute_blocks
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss, Policy
from dschat_lora.supervised.objectives import causal_lm_loss
from dschat_lora.supervised.pair_objectives import answer_logprobs
from helpers import plain
from helpers.pairs import plain_logprobs, ragged_pairs
from helpers.rounding import assert_same_sums
from helpers.spread import ALL
from helpers.tiny import FEW, RECURRENT, UNPACKED, VOCAB, ragged_samples, unusual_model

CPU = torch.device("cpu")
PACKED = RECURRENT if ALL else [kind for kind in FEW if kind in RECURRENT]


@pytest.mark.parametrize("kind", PACKED)
def test_samples_of_a_packed_row_are_computed_as_stock_transformers_does_alone(kind):
    model = unusual_model(kind)
    samples = ragged_samples(5, longest=13)
    samples.insert(3, SequenceSample.of([5], [5]))  # between two others of a row
    batch = SampleCollator(0)([samples[:2], samples[2:]])
    ids = [torch.as_tensor(each.input_ids, dtype=torch.long)[None] for each in samples]
    stock = torch.cat([model.base_model(input_ids=x, use_cache=False)[0][0] for x in ids])
    stock.square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    backbone = Backbone(model)
    assert backbone.skips_padding(CPU)
    for recomputes in (False, True):
        model.zero_grad()
        if recomputes:
            recompute_blocks(model.train())
        states = backbone(batch.input_ids, batch.position_ids, batch.segment_ids)
        states = states[batch.segment_ids > 0]
        assert_same_sums(states, stock)
        states.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            error = (grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
            assert error < 1e-5, (name, recomputes)


@pytest.mark.parametrize("kind", PACKED)
def test_a_look_at_the_model_finds_packed_rows_and_trees_exact(kind):
    report = check_architecture(Backbone(unusual_model(kind)), vocab_size=VOCAB, device=CPU)
    assert report.packing_is_exact
    assert report.tree_is_exact


@pytest.mark.parametrize("kind", ["granitemoehybrid", "recurrent_gemma"])
@torch.no_grad()
def test_logits_that_such_a_model_transforms_are_those_of_each_sample_alone(kind):
    model = unusual_model(kind)
    model.config.logits_scaling = 0.5  # recurrent_gemma caps them

    def whole(network):
        network.full_logits = True
        return network

    samples = ragged_samples(5, longest=13)
    batch = SampleCollator(0)([samples[3:], samples[:3]])  # padding lies between samples
    assert batch.segment_ids[0, -1] == 0
    expected = sum(plain.sample_loss(model, sample)[0] for sample in samples)
    loss = causal_lm_loss(whole(CausalLMLoss(model)), batch).total
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    rows = batch.input_ids, batch.position_ids, batch.segment_ids
    asked = *rows, batch.logit_positions, batch.target_ids, 1.0
    for spans in (batch.spans, None):
        logprobs, _ = whole(Policy(model))(*asked, spans)
        torch.testing.assert_close(-logprobs.sum(), expected, rtol=1e-6, atol=1e-5)
    pairs = ragged_pairs(3)
    trees = PairCollator(0, "shared")([[pair.sample() for pair in pairs]])
    sequences = [(p.sequences[side], len(p.prompt)) for side in (0, 1) for p in pairs]
    expected = torch.stack([plain_logprobs(model, *each).sum() for each in sequences])
    sums = answer_logprobs(whole(CausalLMLogprobs(model)), trees)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", UNPACKED)
def test_types_whose_blocks_hand_nothing_on_are_found_to_mix_samples(kind):
    report = check_architecture(Backbone(unusual_model(kind)), vocab_size=VOCAB, device=CPU)
    assert not report.packing_is_exact
    assert not report.tree_is_exact


def test_a_state_that_goes_on_into_the_next_sample_is_found(monkeypatch):
    model = unusual_model("lfm2")
    backbone = Backbone(model)
    (layer,) = recurrent_layers(model)
    plain = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, spans=None, **options: plain(*a, **options))
    report = check_architecture(backbone, vocab_size=VOCAB, device=CPU)
    assert report.leak_error > 0.1
    assert not report.packing_is_exact


def test_batches_of_sequences_are_of_similar_lengths_and_hold_each_token_once():
    spans = make_spans([[(9,), (2,), (8,)], [(3, 4, 1)], [(40,)]], 40)
    batches, places = spans.batches
    # Of the tree, prefix and first branch are a sequence of 7, prefix and second one of 4.
    assert [tuple(each.shape) for each in batches] == [(1, 40), (3, 9), (1, 4), (1, 2)]
    flat = torch.cat([each.flatten() for each in batches])
    assert flat[places].tolist() == list(range(19 + 8 + 40))
    assert batches[1].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [11, 12, 13, 14, 15, 16, 17, 18, 18],
        [19, 20, 21, 22, 23, 24, 25, 25, 25],
    ]
    assert batches[2].tolist() == [[19, 20, 21, 26]]


def test_sharded_layers_are_not_called_as_often_as_a_rank_has_batches():
    backbone = Backbone(unusual_model("lfm2"))
    assert backbone.skips_padding(CPU)
    for parameter in backbone.model.parameters():
        parameter.ds_id = 0  # as ZeRO 3 marks what layers gather when they are called
    assert not backbone.skips_padding(CPU)
    assert not check_architecture(backbone, vocab_size=VOCAB, device=CPU).packing_is_exact


def test_layers_with_a_convolution_over_time_are_the_recurrent_ones():
    model = unusual_model("falcon_h1")
    assert recurrent_layers(model) == [each.mamba for each in model.model.layers]
    assert recurrent_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
