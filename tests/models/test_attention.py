"""Attention by spans: made with batches, and left out where there are none.

What it gives is that of each sequence alone, see test_packed_rows.py and test_pair_rows.py.
"""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.config.stages import DpoConfig
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.engine.distributed import planned_processes
from dschat_lora.models import backbone as backbone_module
from dschat_lora.models.attention import attend_by_spans
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss, Policy
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from dschat_lora.supervised import objectives as objective
from dschat_lora.supervised.pair_objectives import dpo_objective, score_ends
from helpers.pairs import ragged_pairs
from helpers.tiny import ragged_samples, tiny_model

CPU = torch.device("cpu")


def inputs_of(batch):
    names = ("input_ids", "position_ids", "segment_ids", "branch_ids", "spans")
    return {name: getattr(batch, name) for name in names if hasattr(batch, name)}


def batches():
    samples = ragged_samples(6)
    pairs = [each.sample() for each in ragged_pairs(4)]
    return {
        "packed": SampleCollator(0)([samples[:3], samples[3:5], samples[5:]]),
        "full": SampleCollator(0)([samples]),
        "trees": PairCollator(0, "shared")([pairs[:2], pairs[2:]]),
        "separate": PairCollator(0, "separate")([pairs[:1], pairs[1:]]),
    }


def test_spans_are_made_with_the_batch_and_used_by_every_loss(monkeypatch):
    def none(*ids):
        raise AssertionError("spans were looked for")

    monkeypatch.setattr(backbone_module, "find_spans", none)
    model = tiny_model("llama")
    rows = batches()
    for name in ("packed", "full"):
        assert objective.causal_lm_loss(CausalLMLoss(model), rows[name]).total.isfinite()
    loss = dpo_objective(DpoConfig(), lambda batch: batch.reference).loss
    for name in ("trees", "separate"):
        assert loss(CausalLMLogprobs(model), rows[name]).total.isfinite()
        model.score = torch.nn.Linear(32, 1)
        assert score_ends(RewardModel(model), rows[name]).isfinite().all()
    responses = collate(
        [Response((5, 6), (7, 8), True, 0), Response((5,), (7,), True, 0)], [0, 1], 0
    )
    inputs = *responses.inputs, responses.logit_positions, responses.target_ids, 1.0
    assert Policy(model)(*inputs, responses.spans)[0].isfinite().all()
    full = rows["full"]
    with pytest.raises(AssertionError, match="looked for"):
        Backbone(model)(full.input_ids, full.position_ids, full.segment_ids)


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
    ours, _ = attend_by_spans(Layer(), query, key, value, given)
    theirs, _ = sdpa_attention_forward(Layer(), query, key, value, given)
    assert torch.equal(ours, theirs)


def test_a_batch_of_nothing_is_computed_under_its_mask():
    model = tiny_model("llama")
    empty = SampleCollator(0).empty()
    hidden = Backbone(model)(**inputs_of(empty))
    assert hidden.shape[:2] == (1, 1)
    assert torch.isfinite(hidden).all()


def test_generation_is_what_it_was():
    model = tiny_model("opt")
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    Backbone(model)
    after = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(before, after)


def test_padding_is_computed_under_the_models_own_mask_and_where_no_kernel_skips_it():
    backbone = Backbone(tiny_model("opt"))
    backbone.own_mask = True
    assert not backbone.skips_padding(CPU)
    assert not Backbone(tiny_model("opt")).skips_padding(torch.device("cuda"))
    assert not Backbone(tiny_model("opt", "eager")).skips_padding(CPU)
    narrow = Backbone(tiny_model("opt").bfloat16())
    assert narrow.skips_padding(CPU)
    # On a GPU that is planned for, the kernel takes 16 bits and heads of a multiple of 8.
    with planned_processes(1):
        assert not Backbone(tiny_model("opt")).skips_padding(None)
        assert narrow.skips_padding(None)
        narrow.model.config.head_dim = 12
        assert not narrow.skips_padding(None)
