from dataclasses import replace

import pytest
import torch
from toy import toy_model

from dschat_lora.config.groups import LoraConfig, OptimConfig, ScheduleConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.lora.rates import (
    adapter_learning_rate,
    capacity_warnings,
    length_warning,
    parameter_groups,
    rate_warning,
    ruled_rates,
)

EVERYTHING = {
    "lora_dim": 2,
    "target_modules": ("embed", "q_proj"),
    "train_bias": "lora_only",
    "modules_to_save": ("project",),
}


def groups_of(lora, **optim):
    model = toy_model()
    apply_lora(model, LoraConfig(**lora), seed=0)
    groups = parameter_groups(model, OptimConfig(**optim))
    names = {id(p): name for name, p in model.named_parameters()}
    listed = {g["name"]: [names[id(p)] for p in g["params"]] for g in groups}
    return model, {g["name"]: g for g in groups}, listed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5e-4),
        ({"learning_rate": 1e-3}, 5e-4),
        ({"lora_learning_rate": 2e-4}, 2e-4),
        ({"learning_rate": 1e-5, "lora_lr_multiplier": 3}, 3e-5),
    ],
)
def test_adapter_rate_is_given_or_a_multiple_or_the_default(options, expected):
    assert adapter_learning_rate(OptimConfig(**options)) == pytest.approx(expected)


DPO_RATES = {"default_lora_learning_rate": 1e-5, "learning_rate": 5e-6, "lora_learning_rate": 5e-6}


@pytest.mark.parametrize(
    ("options", "full"),
    [
        *((each, None) for each in ({}, {"learning_rate": 9.65e-6}, {"learning_rate": 1e-3})),
        ({"learning_rate": 9.65e-6, "lora_lr_multiplier": 2}, None),
        *(({"lora_lr_multiplier": n}, None) for n in (10, 15)),
        (DPO_RATES, None),  # where --learning_rate is that of adapters
        *(({"lora_learning_rate": rate}, 5e-5) for rate in (5e-5, 1e-5)),
        ({"lora_learning_rate": 9.65e-6, "learning_rate": 9.65e-6}, 9.65e-6),
        ({"lora_learning_rate": 1e-5, "learning_rate": 1e-3}, 5e-5),
        ({"lora_lr_multiplier": 1}, 5e-5),
    ],
)
def test_adapters_at_a_rate_of_full_fine_tuning_are_warned_about(options, full):
    warning = rate_warning(OptimConfig(**options), LoraConfig(lora_dim=8))
    if full is None:
        assert warning is None
        return
    assert "a learning rate of full fine-tuning" in warning
    # As measured in "LoRA Without Regret" (Thinking Machines, 2025).
    assert "about 10 times that" in warning
    assert warning.endswith(f"try --lora_learning_rate {10 * full:g}")
    assert rate_warning(OptimConfig(**options), LoraConfig(lora_dim=0)) is None
    above = rate_warning(OptimConfig(lora_lr_multiplier=20), LoraConfig(lora_dim=8))
    assert "--lora_lr_multiplier 20 is above 15" in above


@pytest.mark.parametrize("ratio", [1, 16])
def test_frozen_base_is_in_no_group_and_loraplus_gives_b_its_own_rate(ratio):
    _, groups, listed = groups_of(EVERYTHING, loraplus_lr_ratio=ratio, weight_decay=0.1)
    blocks = ("blocks.0.q_proj", "blocks.1.q_proj")
    own = [f"{name}.lora_{each}" for name in blocks for each in "AB"]
    expected = {
        "lora": [
            *(f"embed.lora_embedding_{each}" for each in "AB"),
            "project.trained.weight",
            *own,
        ],
        "lora_no_decay": ["project.trained.bias", *(f"{name}.trained_bias" for name in blocks)],
    }
    rates = {"lora": (5e-4, 0.1), "lora_no_decay": (5e-4, 0.0)}
    if ratio > 1:
        expected["lora_B"] = [name for name in own if name.endswith("lora_B")]
        expected["lora"] = [name for name in expected["lora"] if not name.endswith("lora_B")]
        rates["lora_B"] = (pytest.approx(16 * 5e-4), 0.1)
    assert listed == expected
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == rates


@pytest.mark.parametrize("r", [2, 0])
def test_classic_mode_gives_base_and_adapters_their_rates_and_spares_vectors_decay(r):
    model, groups, listed = groups_of(
        {"lora_dim": r, "only_optimize_lora": False},
        learning_rate=1e-5,
        lora_learning_rate=2e-4,
        weight_decay=0.1,
    )
    rates = {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()}
    expected = {"base": (1e-5, 0.1), "base_no_decay": (1e-5, 0.0), "lora": (2e-4, 0.1)}
    assert rates == {name: each for name, each in expected.items() if r or name != "lora"}
    vectors = {name for name, p in model.named_parameters() if p.ndim == 1}
    assert set(listed["base_no_decay"]) == vectors
    assert {"blocks.0.norm.weight", "blocks.0.c_proj.bias"} <= vectors
    assert "embed.weight" in listed["base"]
    grouped = sorted(name for names in listed.values() for name in names)
    assert grouped == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    torch.optim.AdamW(list(groups.values()))


def test_a_rate_of_experts_is_refused_where_none_is_adapted():
    with pytest.raises(ValueError, match=r"--expert_learning_rate 0\.001 is for MoE experts"):
        groups_of({"lora_dim": 2}, expert_learning_rate=1e-3)


def test_sharded_matrix_is_still_a_matrix():
    # ZeRO 3 leaves a flat, empty tensor and notes the shape beside.
    model = toy_model()
    sharded = model.project.weight
    sharded.ds_shape = torch.Size(sharded.shape)
    sharded.data = torch.empty(0)
    groups = {g["name"]: g for g in parameter_groups(model, OptimConfig(weight_decay=0.1))}
    assert any(p is sharded for p in groups["base"]["params"])


@pytest.mark.parametrize(
    ("model_type", "width", "stage", "lora", "base", "adapter"),
    [
        # Worked out from the rules: 2000 / 4096 to the powers 0.781, 0.0775 and 0.5.
        ("llama", 4096, "sft", {"lora_dim": 32}, 2.855e-5, 2.855e-4),
        ("qwen3", 4096, "reward", {"lora_dim": 1}, 4.730e-5, 4.730e-4),
        ("opt", 4096, "sft", {"lora_dim": 8}, 3.494e-5, 3.494e-4),
        # The recipes that the factors of the stages come from.
        ("llama", 4096, "rlhf", {"lora_dim": 32}, 4e-6, 4e-5),
        ("llama", 2048, "dpo", {"lora_dim": 32}, 1e-6, 1e-5),
        # The update of a step is the rate times the scale.
        ("opt", 2000, "sft", {"lora_dim": 16, "lora_alpha": 64}, 5e-5, 2.5e-4),
        ("opt", 2000, "sft", {"lora_dim": 16, "use_rslora": True}, 5e-5, 1.25e-4),
        ("opt", 2000, "sft", {"lora_dim": 0}, 5e-5, 5e-5),
    ],
)
def test_rates_by_rule_are_those_that_were_published(model_type, width, stage, lora, base, adapter):
    rates = ruled_rates(model_type, width, stage=stage, lora=LoraConfig(**lora))
    assert rates[:2] == pytest.approx((base, adapter), rel=0.02)
    lora = LoraConfig(lora_dim=4, lora_alpha=16)
    assert ruled_rates("qwen2", 896, stage="rlhf", lora=lora).reason == (
        "5e-05 x (2000 / 896)^0.0775, the exponent of qwen, x 0.14 for rlhf, x 10 for LoRA, "
        "x 2 for its scale"
    )


def test_a_run_that_ends_before_its_warm_up_is_warned_of():
    config = ScheduleConfig(lr_scheduler_type="cosine", num_warmup_steps=10)
    assert length_warning(config, 11) is None
    assert length_warning(config, 0) is None
    assert length_warning(replace(config, lr_scheduler_type="constant"), 5) is None
    warning = length_warning(replace(config, num_warmup_steps=50), 50)
    assert warning.startswith("the run has 50 optimizer steps and --num_warmup_steps 50")
    assert "warm up for 5 steps" in warning


@pytest.mark.parametrize(
    ("samples", "tokens", "words"),
    [
        (128, 2000, []),
        (129, 2000, ["a step has about 129 samples"]),
        # 1,000 parameters hold 2,000 bits; five times as many want five times the rank.
        (8, 10000, ["--lora_dim 40"]),
        (8, 2001, ["--lora_dim 9"]),
        # A rank of 64 or more is that of all weights, 64 wide.
        (8, 15750, ["try --lora_dim 63, or train all weights"]),
        (8, 15751, ["than full fine-tuning; train all weights"]),
    ],
)
def test_batches_and_data_that_are_too_much_for_an_adapter_are_warned_of(samples, tokens, words):
    lora = LoraConfig(lora_dim=8)
    sizes = {"samples_per_step": samples, "parameters": 1000, "tokens": tokens, "width": 64}
    found = capacity_warnings(lora, **sizes)
    assert len(found) == len(words)
    for warning, expected in zip(found, words, strict=True):
        assert expected in warning
    assert capacity_warnings(LoraConfig(), **sizes) == []
