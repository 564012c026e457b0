"""NEFTune's noise is that of transformers, and of each sequence's own length in packed rows."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from dschat_lora.data.batch import SampleCollator
from dschat_lora.models.causal_lm import CausalLMLoss
from helpers.tiny import ragged_samples, tiny_model

ALPHA = 30.0


def loss_of(network, batch):
    places = batch.input_ids, batch.position_ids, batch.segment_ids, batch.logit_positions
    torch.manual_seed(5)
    return network(*places, batch.target_ids, batch.spans)


def packed(samples):
    return SampleCollator(pad_id=0)([samples])


def noise_of(samples, **changed):
    """What is added to the embeddings of a packed row; the backbone has attributes ``changed``."""
    network = CausalLMLoss(tiny_model("opt"), neftune_noise_alpha=ALPHA).train()
    vars(network.backbone).update(changed)
    noises, add = [], network.backbone.add_noise

    def watched(module, inputs, output):
        noisy = add(module, inputs, output)
        noises.append((noisy - output).detach())
        return noisy

    embedding = network.model.get_input_embeddings()
    embedding._forward_hooks.clear()
    embedding.register_forward_hook(watched)
    loss_of(network, packed(samples))
    return noises[0].flatten(0, 1)


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_loss_of_a_single_sequence_is_that_of_transformers_hook(kind):
    sample = [s for s in ragged_samples(20) if len(s.input_ids) > 8][:1]
    ours = loss_of(
        CausalLMLoss(tiny_model(kind), neftune_noise_alpha=ALPHA).train(), packed(sample)
    )
    model = tiny_model(kind)
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = ALPHA
    embedding.register_forward_hook(neftune_post_forward_hook)
    theirs = loss_of(CausalLMLoss(model).train(), packed(sample))
    plain = loss_of(CausalLMLoss(tiny_model(kind)).train(), packed(sample))
    torch.testing.assert_close(ours, theirs)
    assert abs(ours - plain) > 1e-3 * abs(plain)


def test_noise_of_a_packed_row_is_bounded_by_each_sequences_own_length():
    samples = [s for s in ragged_samples(40) if len(s.input_ids) in (5, 16)]
    short = next(s for s in samples if len(s.input_ids) == 5)
    long = next(s for s in samples if len(s.input_ids) == 16)
    noise = noise_of([short, long])
    for rows, length in ((noise[:5], 5), (noise[5:21], 16)):
        bound = ALPHA / (length * 32) ** 0.5
        largest = rows.abs().max().item()
        assert 0.95 * bound < largest <= bound * (1 + 1e-6)


@pytest.mark.parametrize("by_spans", [True, False], ids=["tokens alone", "whole rows"])
def test_padding_that_ranks_share_tokens_by_has_no_noise(by_spans):
    """Under sequence parallelism a row is made as long as the ranks can divide."""
    sample = next(s for s in ragged_samples(40) if len(s.input_ids) == 5)
    group = SimpleNamespace(sequence_parallel=True, size=4)
    noise = noise_of([sample], by_spans=by_spans, _group=group)
    assert len(noise) % 4 == 0
    assert (noise[:5] != 0).any(1).all()
    padding = noise[len(packed([sample]).input_ids[0]) :]
    assert len(padding) > 0
    assert (padding == 0).all()


def test_evaluation_has_no_noise():
    batch = packed(ragged_samples(2))
    noisy = CausalLMLoss(tiny_model("opt"), neftune_noise_alpha=ALPHA)
    network = noisy.train()
    loss_of(network, batch)
    expected = loss_of(CausalLMLoss(tiny_model("opt")).eval(), batch)
    torch.testing.assert_close(loss_of(network.eval(), batch), expected)
