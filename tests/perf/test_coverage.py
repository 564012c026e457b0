"""Which kinds of layers are said to learn, and what share of the linear weights they are."""

import pytest
import torch
from test_expert_counts import ListedExperts, adapt, adapt_experts, build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForSequenceClassification

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.perf.coverage import coverage
from helpers.perf_models import gpt2, llama, opt

REST = "embeddings, norms, lm_head"
QKVO = "q_proj, k_proj, v_proj, o_proj"
MLP = "gate_proj, up_proj, down_proj"


def lora(model, **options):
    apply_lora(model, LoraConfig(lora_dim=4, **options), seed=0)
    return model


def test_a_dense_model_learns_in_all_its_linear_layers():
    found = coverage(adapt(llama()))
    assert found.words == f"{QKVO}, {MLP} of 3 layers; frozen: {REST}"
    assert found.share == 1
    assert found.warning is None


def test_experts_and_router_that_no_adapter_reaches_are_named_with_their_share():
    """Hidden 64: attention 64 * 192, experts 4 * 3 * 64 * 96, a router 4 * 64."""
    found = coverage(adapt(build("mixtral")))
    assert found.words == (
        f"{QKVO} of 2 layers; frozen: router, experts, embeddings, norms, lm_head"
    )
    attention, experts, router = 64 * 192, 4 * 3 * 64 * 96, 4 * 64
    share = attention / (attention + experts + router)
    assert found.share == pytest.approx(share)
    assert found.warning == (
        f"adapters reach {share:.0%} of the weights of linear layers; left out: experts "
        f"({experts / (attention + experts + router):.0%})"
    )


def test_adapted_experts_are_one_kind_of_their_number_of_layers():
    model = adapt_experts(build("qwen3_moe"))
    found = coverage(model)
    assert found.words == f"experts of 1 layer; frozen: {QKVO}, {MLP}, router, {REST}"
    kinds = [(part.kind, part.learns, part.layers) for part in found.parts]
    assert ("experts", True, 1) in kinds


def test_experts_that_the_package_adapts_learn_and_their_router_does_not():
    found = coverage(adapt(build("gpt_oss"), experts=2))
    assert found.words == (
        f"{QKVO}, experts of 2 layers; frozen: router, embeddings, sinks, norms, lm_head"
    )
    assert found.warning is None


def test_experts_that_are_modules_of_their_own_go_by_the_same_word():
    model = build("qwen3_moe", mlp_only_layers=[0, 1])
    model.model.layers[1].mlp = ListedExperts(2, 4, 64, 32)
    found = coverage(adapt(model, "q_proj", "up", "down", experts=2))
    assert found.words.startswith("q_proj of 2 layers, experts of 1; frozen: k_proj")
    assert ", router, " in found.words


def test_one_matrix_of_the_experts_is_named_where_the_other_stays_frozen():
    found = coverage(adapt_experts(build("qwen3_moe"), names=("down_proj",)))
    assert found.words.startswith("experts.down_proj of 1 layer; frozen: ")
    assert "experts.gate_up_proj" in found.words.partition("frozen: ")[2]


def test_dense_and_shared_layers_are_told_apart_and_counted_each():
    found = coverage(adapt(build("glm4_moe")))
    assert found.words == (
        f"{QKVO} of 2 layers, {MLP}, shared_experts of 1; "
        "frozen: experts, router, embeddings, norms, lm_head"
    )


def test_a_kind_that_learns_in_some_layers_says_so_on_both_sides():
    model = lora(llama(), target_modules=(r".*layers\.[01]\..*(q|v)_proj",))
    found = coverage(model)
    assert found.words == (
        f"q_proj, v_proj of 2 layers; frozen: k_proj, o_proj, {MLP}, q_proj of 1, v_proj of 1, "
        f"{REST}"
    )
    attention, mlp = 64 * (64 + 32 + 32 + 64), 3 * 64 * 160
    assert found.share == pytest.approx(2 * 64 * (64 + 32) / (3 * (attention + mlp)))


def test_what_trains_in_full_beside_adapters_learns():
    found = coverage(lora(opt(), target_modules=("q_proj",), modules_to_save=("lm_head",)))
    assert found.words.startswith("q_proj of 3 layers, lm_head; frozen: k_proj, v_proj")
    found = coverage(lora(gpt2(), target_modules=("wte", "c_fc"), train_bias="all"))
    learns = found.words.partition("; frozen: ")[0]
    assert set(learns.replace(" of 3 layers", "").split(", ")) == {
        *("embeddings", "c_fc", "biases", "norms")
    }


def test_a_model_without_adapters_trains_every_weight():
    found = coverage(llama())
    assert found.words == "every weight"
    assert found.share == 1


def test_a_score_head_is_named_as_the_layer_it_is():
    model = LlamaForSequenceClassification(llama().config)
    found = coverage(lora(model, modules_to_save=("score",)))
    assert found.words == f"{QKVO}, {MLP} of 3 layers, score; frozen: embeddings, norms"


def test_a_vision_tower_is_named_whole_and_is_no_part_of_the_share():
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 80}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 56}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = coverage(lora(model, target_modules=(r".*language_model.*(q|k|v|o)_proj",)))
    assert found.words == (
        f"{QKVO} of 2 layers; frozen: {MLP}, vision_tower, multi_modal_projector, {REST}"
    )
    assert found.share == pytest.approx(4 * 32 * 32 / (4 * 32 * 32 + 3 * 32 * 64))


def test_what_is_recorded_has_the_sizes_of_each_kind():
    found = coverage(adapt(build("mixtral"))).to_dict()
    assert found["learns"]["q_proj"] == {"layers": 2, "weights": 2 * 64 * 64}
    assert found["frozen"]["experts"] == {"layers": 2, "weights": 2 * 4 * 3 * 64 * 96}
    assert found["frozen"]["lm_head"] == {"layers": 0, "weights": 0}
    assert found["linear_share"] < 0.5


def test_parameters_of_no_layer_go_by_their_own_names():
    model = adapt(build("mixtral"))
    model.model.layers[0].sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert "sinks" in coverage(model).words.partition("frozen: ")[2].split(", ")
