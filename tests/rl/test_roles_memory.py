"""The memory of four roles on one large base, counted by hand."""

from dataclasses import replace

import peft
import pytest
import torch
from transformers import OPTConfig

from dschat_lora.config.groups import LoraConfig
from dschat_lora.rl.loop.memory import cache_bytes, memory_plan
from helpers.roles import LAYERS, config_of, roles_of


def opt_1_3b():
    return OPTConfig(
        vocab_size=50272,
        hidden_size=2048,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        max_position_embeddings=2048,
        word_embed_proj_dim=2048,
    )


def with_adapter_configs(directory, dim):
    """The shape of OPT-1.3B and of two adapters on it, whose weights are nowhere."""
    opt_1_3b().save_pretrained(directory / "base")
    made = []
    for task in ("CAUSAL_LM", "SEQ_CLS"):
        path = directory / task
        peft.LoraConfig(
            r=dim,
            lora_alpha=2 * dim,
            target_modules=LAYERS["opt"],
            modules_to_save=["score"] if task == "SEQ_CLS" else None,
            task_type=task,
            base_model_name_or_path=str(directory / "base"),
        ).save_pretrained(path)
        (path / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        made.append(str(path))
    return made


def bytes_of(parameters):
    """Of each tensor once."""
    unique = {id(p): p.numel() * p.element_size() for p in parameters}
    return sum(unique.values())


# By hand, for OPT-1.3B: token and position embeddings, their norms and biases.
BASE_VALUES = (50272 + 2050) * 2048 + 2 * 2048
BASE_VALUES += 24 * (4 * (2048 * 2048 + 2048) + 2 * 2048 * 8192 + 8192 + 2048 + 4 * 2048)
# q, k, v, out: 2048 to 2048; fc1 and fc2 between 2048 and 8192.
FACTOR_VALUES = 24 * 16 * (4 * (2048 + 2048) + 2 * (2048 + 8192))


@pytest.fixture
def large_roles(tmp_path, monkeypatch):
    """The roles of OPT-1.3B with adapters of rank 16, shapes alone."""

    def stored(directory):
        saved = ("score",) if directory.name == "SEQ_CLS" else ()
        layers = tuple(LAYERS["opt"])
        return LoraConfig(lora_dim=16, target_modules=layers, modules_to_save=saved)

    monkeypatch.setattr("dschat_lora.models.build.lora_config_of", stored)
    monkeypatch.setattr("dschat_lora.models.build.load_adapter", lambda *_, **__: None)
    monkeypatch.setattr("dschat_lora.models.build._check_layers", lambda *_: None)
    actor, reward = with_adapter_configs(tmp_path, 16)
    config = config_of(
        actor={"lora_dim": 16},
        critic={"lora_dim": 16},
        data={"max_prompt_seq_len": 256, "max_answer_seq_len": 256},
        batch={"per_device_generation_batch_size": 8, "per_device_training_batch_size": 4},
    )
    return config, roles_of(config, actor, reward, dtype=torch.bfloat16, meta=True)


@pytest.mark.thorough
def test_four_roles_of_a_large_model_take_little_more_than_one_base(large_roles):
    _, roles = large_roles
    whole = bytes_of(roles.whole().parameters())
    # four adapters in fp32; two 16-bit heads that nobody uses lie behind those of the scorers
    heads = 2 * 4 * 2048
    assert 0 <= whole - (2 * BASE_VALUES + 4 * 4 * FACTOR_VALUES + heads) <= 2 * 2 * 2048
    assert whole / (2 * BASE_VALUES) == pytest.approx(1.086, abs=1e-3)


@pytest.mark.thorough
def test_later_turns_take_room_for_the_longest_episode_and_what_the_shortest_may_add(large_roles):
    config, roles = large_roles
    episodes = replace(config)
    vars(episodes)["players"] = ["one"]
    # 8 rows of 512 tokens and 256 further ones, beside those of the turn before
    columns = 2 * (512 + 256)
    assert cache_bytes(episodes, roles.actor.model) == 2 * 24 * 2048 * 8 * columns * 2


def test_memory_plan_is_what_one_counts_by_hand(large_roles):
    config, roles = large_roles
    config = replace(config, load=replace(config.load, dtype="bf16"))
    plan = memory_plan(config, roles)
    assert plan.weights == bytes_of(roles.whole().parameters())
    own = [bytes_of(m.model.parameters()) for m in roles.models.values()]
    assert plan.separate_weights == sum(own) > 3.9 * plan.weights / 1.1
    # gradient, mean and square of what trains, four bytes each
    assert plan.training == 12 * (2 * FACTOR_VALUES + 2048)
    # keys and values of 8 rows of 512 tokens, two bytes each
    assert plan.cache == cache_bytes(config, roles.actor.model) == 2 * 24 * 2048 * 8 * 512 * 2
    assert plan.peak == plan.weights + plan.training + max(plan.update, plan.cache)
    assert plan.to_dict()["peak"] == plan.peak
    line = plan.line(of_parts=True)
    assert f"up to {plan.peak / 2**30:.3g} GiB" in line
    assert f"(as separate models: {plan.separate_weights / 2**30:.3g})" in line
