"""The load-balancing loss of a mixture of experts, against that of stock transformers."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.samples import SequenceSample
from dschat_lora.models.causal_lm import CausalLMLoss
from fakecuda.captured import tiny

INPUTS = ("input_ids", "position_ids", "segment_ids", "logit_positions", "target_ids")
IDS = torch.tensor([[5, 9, 11, 3, 7, 8, 200, 41], [6, 4, 300, 2, 77, 15, 16, 400]])


def make(kind, **options):
    config = tiny(kind)
    for name, value in options.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


def batch_of(rows):
    """Rows of one sequence each, in which every token but the first is supervised; 0 is padding."""
    batch = SampleCollator(0)([[SequenceSample.of(row, row)] for row in rows])
    return {name: getattr(batch, name) for name in INPUTS}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_the_loss_of_a_step_is_that_of_transformers(kind):
    coefficient = 0.3
    model = make(kind, router_aux_loss_coef=coefficient, output_router_logits=True)
    stock, network = copy.deepcopy(model), CausalLMLoss(model, router_aux_loss_coef=coefficient)
    batch = batch_of(IDS.tolist())
    expected = stock.train()(input_ids=IDS, labels=IDS)
    loss = network.train()(**batch) / len(batch["target_ids"])
    assert loss.item() == pytest.approx(expected.loss.item(), abs=2e-6)
    plain = CausalLMLoss(copy.deepcopy(model)).train()(**batch) / len(batch["target_ids"])
    assert (loss - plain).item() == pytest.approx(coefficient * expected.aux_loss.item(), rel=1e-5)
    assert (loss - plain).item() > 0.3
    expected.loss.backward()
    loss.backward()
    for name, parameter in model.named_parameters():
        twin = stock.get_parameter(name).grad
        assert (parameter.grad - twin).norm() <= 2e-5 * twin.norm() + 1e-7, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_is_not_balanced(attention):
    """Computed or skipped, it has no part in the loss of a padded batch."""
    model = make("qwen3_moe")
    model.set_attn_implementation(attention)
    network = CausalLMLoss(model, router_aux_loss_coef=0.3).train()
    plain = CausalLMLoss(model).train()
    ragged = batch_of([IDS[0].tolist(), IDS[1, :5].tolist()])
    with torch.no_grad():
        balance = (network(**ragged) - plain(**ragged)) / len(ragged["target_ids"])
        mask = (ragged["segment_ids"] > 0).long()
        stock = model(ragged["input_ids"], attention_mask=mask, output_router_logits=True)
    assert balance.item() == pytest.approx(0.3 * stock.aux_loss.item(), rel=1e-4)


def test_evaluation_is_without_it():
    model = make("qwen3_moe")
    batch = batch_of(IDS.tolist())
    with torch.no_grad():
        balanced = CausalLMLoss(model, router_aux_loss_coef=0.3).eval()(**batch)
        assert torch.equal(balanced, CausalLMLoss(model).eval()(**batch))


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_a_model_without_such_a_loss_is_refused(kind):
    with pytest.raises(ValueError, match=r"--router_aux_loss_coef 0\.1: .* has no load-balancing"):
        CausalLMLoss(make(kind), router_aux_loss_coef=0.1)
