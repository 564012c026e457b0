"""Labels are smoothed in training alone, and sums are by group, on every path to the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dschat_lora.algos.logprobs import GroupSums
from dschat_lora.data.batch import SampleCollator
from dschat_lora.models.causal_lm import CausalLMLoss, LinearHead
from helpers.rounding import assert_same_gradients, gradients_of
from helpers.tiny import VOCAB, ragged_samples, tiny_model

INPUTS = ("input_ids", "position_ids", "segment_ids", "logit_positions", "target_ids")


def plain(network):
    """The output embedding's own weight, a chunk at a time."""


def full_logits(network):
    """The model's own logits."""
    network.full_logits = True


def other_head(network):
    """A head that is no plain linear layer, called under checkpointing."""
    network.head = LinearHead(nn.Sequential(network.model.get_output_embeddings()), VOCAB)
    assert not network.head.plain


@pytest.fixture(params=[plain, full_logits, other_head])
def network(request):
    # In fp32, of some machines, rounding alone moves a gradient by as much as is allowed here.
    network = CausalLMLoss(tiny_model("gpt2").double(), label_smoothing=0.2)
    request.param(network)
    network.head.rows = 5
    return network


def cross_entropy(network, batch, **options):
    """Of torch, from the logits of each row alone."""
    logits = network.model(input_ids=batch.input_ids).logits.flatten(0, 1).float()
    return F.cross_entropy(logits[batch.logit_positions], batch.target_ids, **options)


def test_loss_and_gradient_are_smoothed_in_training_and_plain_in_evaluation(network):
    batch = SampleCollator(0)([[sample] for sample in ragged_samples(3)])
    inputs, losses = {name: getattr(batch, name) for name in INPUTS}, []
    for trains, smoothing in ((True, 0.2), (False, 0.0)):
        loss = network.train(trains)(**inputs)
        expected = cross_entropy(network, batch, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(loss.float(), expected)
        ours, theirs = (gradients_of(each, network.model) for each in (loss, expected))
        assert_same_gradients(ours, theirs, least=0.1)
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) > 0.1


def test_groups_of_targets_have_their_own_sums_once(network):
    batch = SampleCollator(0)([[sample] for sample in ragged_samples(6)])
    group = torch.arange(batch.num_targets) % 3
    groups = GroupSums(group, torch.zeros(4, dtype=torch.float64))
    inputs = {name: getattr(batch, name) for name in INPUTS}
    loss = network.train()(**inputs, groups=groups)
    torch.testing.assert_close(loss, network.train()(**inputs), rtol=0, atol=0)
    loss.backward()  # which forms logits again on some paths
    losses = cross_entropy(network, batch, reduction="none").detach()
    for number in range(3):
        torch.testing.assert_close(groups.sums[number].float(), losses[group == number].sum())
    assert groups.sums[3] == 0
