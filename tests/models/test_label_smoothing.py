"""Labels are smoothed in training alone, and sums are by group, on every path to the loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dschat_lora.algos.logprobs import GroupSums
from dschat_lora.data.batch import SampleCollator
from dschat_lora.models.causal_lm import CausalLMLoss
from helpers.tiny import ragged_samples, tiny_model

INPUTS = ("input_ids", "position_ids", "segment_ids", "logit_positions", "target_ids")


def plain(network):
    """The output embedding's own weight, a chunk at a time."""


def full_logits(network):
    """The model's own logits."""
    network.full_logits = True


def other_head(network):
    """A head that is no plain linear layer, called under checkpointing."""
    weight = network.head.weight
    network.head.plain, network.head.rows = False, 5
    network.head.module = nn.Sequential(nn.Linear(*weight.T.shape, bias=False))
    network.head.module[0].weight = nn.Parameter(weight.detach())


@pytest.mark.parametrize("path", [plain, full_logits, other_head])
def test_loss_is_smoothed_in_training_and_plain_in_evaluation(path):
    network = CausalLMLoss(tiny_model("gpt2"), label_smoothing=0.2)
    path(network)
    batch = SampleCollator(0)([[sample] for sample in ragged_samples(3)])
    inputs = {name: getattr(batch, name) for name in INPUTS}
    with torch.no_grad():
        trained, evaluated = (network.train(mode)(**inputs) for mode in (True, False))
        logits = network.model(input_ids=batch.input_ids).logits.flatten(0, 1)
        logits = logits[batch.logit_positions]
    common = {"reduction": "sum"}
    torch.testing.assert_close(evaluated, F.cross_entropy(logits, batch.target_ids, **common))
    smoothed = F.cross_entropy(logits, batch.target_ids, label_smoothing=0.2, **common)
    torch.testing.assert_close(trained, smoothed)
    assert (trained - evaluated).abs() > 0.1


@pytest.mark.parametrize("path", [plain, full_logits, other_head])
def test_groups_of_targets_have_their_own_sums_once(path):
    network = CausalLMLoss(tiny_model("gpt2"), label_smoothing=0.2)
    path(network)
    network.head.rows = 5
    samples = ragged_samples(6)
    batch = SampleCollator(0)([samples[:4], samples[4:]])
    group = torch.arange(batch.num_targets) % 3
    groups = GroupSums(group, torch.zeros(4, dtype=torch.float64))
    inputs = {name: getattr(batch, name) for name in INPUTS}
    loss = network.train()(**inputs, groups=groups)
    torch.testing.assert_close(loss, network.train()(**inputs), rtol=0, atol=0)
    loss.backward()  # which forms logits again on some paths
    with torch.no_grad():
        hidden = network.backbone(*list(inputs.values())[:3]).flatten(0, 1)
        logits = network.model.lm_head(hidden[batch.logit_positions])
        losses = F.cross_entropy(logits, batch.target_ids, reduction="none")
    for number in range(3):
        torch.testing.assert_close(groups.sums[number].float(), losses[group == number].sum())
    assert groups.sums[3] == 0
