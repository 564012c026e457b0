import pytest
import torch
from toy import call_merged, random_ids, randomise, toy_model

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.merge import (
    MergeReport,
    check_merge,
    check_mergeable,
    merge_deviation,
    merged_state_dict,
    untied_by_merge,
)
from dschat_lora.lora.model import adapter_parameters, apply_lora

EVERYTHING = LoraConfig(
    lora_dim=2,
    lora_alpha=3,
    target_modules=("embed", "q_proj", "c_proj"),
    train_bias="all",
    modules_to_save=("head",),
)


def trained(config, dtype=torch.float32):
    model = toy_model(dtype)
    apply_lora(model, config, seed=0)
    randomise(adapter_parameters(model).values())
    return model


def test_merged_weights_in_a_plain_model_give_the_same_logits():
    model, ids = trained(EVERYTHING), random_ids()
    plain, merged = toy_model(), merged_state_dict(model)
    assert merged.keys() == plain.state_dict().keys()
    plain.head.weight = torch.nn.Parameter(plain.head.weight.clone())
    plain.load_state_dict(merged)
    expected = model(ids)
    torch.testing.assert_close(plain(ids), expected, rtol=1e-5, atol=1e-5)
    assert (plain(ids) - toy_model()(ids)).abs().max() > 0.1
    torch.testing.assert_close(call_merged(model, merged, ids), expected)
    assert torch.equal(model(ids), expected)
    # An adapted head that shares the embedding can be merged.
    model.get_input_embeddings, model.get_output_embeddings = lambda: model.embed, lambda: None
    assert untied_by_merge(model)
    check_mergeable(model)


def test_merging_leaves_the_model_untouched_and_shares_no_adapted_memory():
    model = trained(EVERYTHING)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    merged = merged_state_dict(model)
    for name in ("head.weight", "embed.weight", "norm.bias", "blocks.0.q_proj.weight"):
        merged[name].zero_()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_weight_that_blocks_share_is_refused_if_each_adapts_it():
    def shared(**options):
        model = toy_model()
        model.blocks[1].q_proj.weight = model.blocks[0].q_proj.weight
        apply_lora(model, LoraConfig(lora_dim=2, **options), seed=0)
        return model

    words = r"blocks share blocks.0.q_proj.weight, but each has its own adapter"
    with pytest.raises(ValueError, match=words):
        check_mergeable(shared())
    check_mergeable(shared(target_modules=("c_proj",)))


def test_merge_of_a_16_bit_base_rounds_once():
    model = trained(LoraConfig(lora_dim=2, target_modules=("q_proj",)), torch.bfloat16)
    layer = model.blocks[0].q_proj
    exact = layer.weight.double() + layer.scaling * layer.lora_B.double() @ layer.lora_A.double()
    merged = merged_state_dict(model)["blocks.0.q_proj.weight"]
    assert merged.dtype == torch.bfloat16
    # One rounding of the exact sum, up to float32's own error at a tie.
    assert (merged == exact.bfloat16()).float().mean() > 0.98


def test_whole_tensors_stand_in_for_shards_and_one_name_of_a_tied_weight_is_enough():
    model = trained(EVERYTHING)
    expected = {name: t.clone() for name, t in merged_state_dict(model).items()}
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert "head.base.weight" not in whole
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    merged = merged_state_dict(model, whole)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    del whole["project.weight"]
    with pytest.raises(ValueError, match=r"project.weight must be given whole, \(6, 6\)"):
        merged_state_dict(model, whole)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"target_modules": ("embed",)}, ["embed.weight", "head.weight"]),
        ({"modules_to_save": ("head",)}, ["embed.weight", "head.weight"]),
        ({}, []),
    ],
    ids=["factors on the embedding", "head trained in full", "neither"],
)
def test_tied_weights_that_merging_sets_apart_are_named(options, names):
    model = trained(LoraConfig(lora_dim=2, **options))
    merged = merged_state_dict(model)
    one = merged["head.weight"].data_ptr() == merged["embed.weight"].data_ptr()
    assert one == (not names)
    assert torch.equal(merged["head.weight"], merged["embed.weight"]) == one
    assert untied_by_merge(model) == names


def test_deviation_is_the_mean_divergence_over_the_masked_in_tokens():
    # softmax(log p) = p, so the logits below are the distributions themselves.
    p = torch.tensor([[[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]]])
    q = torch.tensor([[[0.25, 0.75], [0.9, 0.1], [0.99, 0.01]]])
    mask = torch.tensor([[True, True, False]])
    # KL of the first token: 0.5 ln 2 + 0.5 ln(2/3) = 0.143841; of the second: 0.
    report = merge_deviation(p.log(), q.log(), mask)
    assert report.kl_nats_per_token == pytest.approx(0.0719205, rel=1e-5)
    # Largest difference: ln(0.5) - ln(0.25).
    assert report.max_abs_logit == pytest.approx(0.693147, rel=1e-5)


def test_deviation_refuses_other_shapes_and_an_empty_probe():
    logits, mask = torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    assert merge_deviation(logits, logits, mask) == MergeReport(0.0, 0.0)
    with pytest.raises(ValueError, match=r"\(1, 2, 3\) and \(1, 2, 4\)"):
        merge_deviation(logits, torch.zeros(1, 2, 4), mask)
    with pytest.raises(ValueError, match="no token"):
        merge_deviation(logits, logits, ~mask)


def test_merge_above_the_threshold_or_of_unknown_deviation_is_refused():
    check_merge(MergeReport(5.0, 0.01), max_kl=0.01)
    with pytest.raises(ValueError, match=r"0\.02 nats per token .* --merge_max_kl 0\.01"):
        check_merge(MergeReport(5.0, 0.02), max_kl=0.01)
    with pytest.raises(ValueError, match="nan nats"):
        check_merge(MergeReport(float("nan"), float("nan")), max_kl=0.01)
