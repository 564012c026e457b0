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


def test_experts_and_router_that_no_adapter_reaches_are_named_with_their_share():
    """Hidden 64: attention 64 * 192, experts 4 * 3 * 64 * 96, a router 4 * 64."""
    covered = coverage(adapt(build("mixtral")))
    assert covered.words == (
        f"{QKVO} of 2 layers; frozen: router, experts, embeddings, norms, lm_head"
    )
    attention, experts, router = 64 * 192, 4 * 3 * 64 * 96, 4 * 64
    share = attention / (attention + experts + router)
    assert covered.share == pytest.approx(share)
    assert covered.warning == (
        f"adapters reach {share:.0%} of the weights of linear layers; not adapted: experts "
        f"({experts / (attention + experts + router):.0%})"
    )


def of_lists():
    """Whose experts are modules of their own."""
    model = build("qwen3_moe", mlp_only_layers=[0, 1])
    model.model.layers[1].mlp = ListedExperts(2, 4, 64, 32)
    return adapt(model, "q_proj", "up", "down", experts=2)


def reward_model():
    return lora(LlamaForSequenceClassification(llama().config), modules_to_save=("score",))


# Of the mixtures: attention 64 x 192, experts 4 x 3 x 64 x 32 of one layer beside a router 4 x 64,
# a dense layer 3 x 64 x 96.
ATTENTION, EXPERTS, ROUTER, DENSE = 64 * 192, 4 * 3 * 64 * 32, 4 * 64, 3 * 64 * 96
LINEAR = 2 * ATTENTION + EXPERTS + ROUTER + DENSE
SHARED, LISTED = EXPERTS // 4, 4 * 2 * 64 * 32
#: model; what is said of it; the share of the weights of its linear layers that learns
WORDS = [
    (lambda: adapt(llama()), f"{QKVO}, {MLP} of 3 layers; frozen: {REST}", 1),
    (
        lambda: adapt_experts(build("qwen3_moe")),
        f"experts of 1 layer; frozen: {QKVO}, {MLP}, router, {REST}",
        EXPERTS / LINEAR,
    ),
    (
        lambda: adapt_experts(build("qwen3_moe"), names=("down_proj",)),
        f"experts.down_proj of 1 layer; frozen: {QKVO}, {MLP}, experts.gate_up_proj, router, "
        f"{REST}",
        EXPERTS / 3 / LINEAR,
    ),
    (
        lambda: adapt(build("gpt_oss"), experts=2),
        f"{QKVO}, experts of 2 layers; frozen: router, embeddings, sinks, norms, lm_head",
        (ATTENTION + 4 * DENSE) / (ATTENTION + 4 * DENSE + ROUTER),
    ),
    (
        of_lists,
        f"q_proj of 2 layers, experts of 1; frozen: k_proj, v_proj, o_proj, {MLP}, router, {REST}",
        (2 * 64 * 64 + LISTED) / (2 * ATTENTION + DENSE + LISTED + ROUTER),
    ),
    (
        lambda: adapt(build("glm4_moe")),
        f"{QKVO} of 2 layers, {MLP}, shared_experts of 1; "
        "frozen: experts, router, embeddings, norms, lm_head",
        (2 * ATTENTION + DENSE + SHARED) / (LINEAR + SHARED),
    ),
    (
        lambda: lora(opt(), target_modules=("q_proj",), modules_to_save=("lm_head",)),
        "q_proj of 3 layers, lm_head; "
        "frozen: k_proj, v_proj, out_proj, fc1, fc2, embeddings, norms",
        1 / 12,
    ),
    (
        lambda: lora(gpt2(), target_modules=("wte", "c_fc"), train_bias="all"),
        "norms, biases, c_fc of 3 layers, embeddings; frozen: c_attn, c_proj, embeddings, lm_head",
        1 / 3,
    ),
    (llama, "every weight", 1),
    (reward_model, f"{QKVO}, {MLP} of 3 layers, score; frozen: embeddings, norms", 1),
]


@pytest.mark.parametrize(("build_model", "words", "share"), WORDS)
def test_what_learns_and_what_does_not_is_named_with_its_layers(build_model, words, share):
    covered = coverage(build_model())
    assert covered.words == words
    assert covered.share == pytest.approx(share)
    assert (covered.warning is None) == (share >= 0.5)


def test_a_kind_that_learns_in_some_layers_says_so_on_both_sides():
    model = lora(llama(), target_modules=(r".*layers\.[01]\..*(q|v)_proj",))
    covered = coverage(model)
    assert covered.words == (
        f"q_proj, v_proj of 2 layers; frozen: k_proj, o_proj, {MLP}, q_proj of 1, v_proj of 1, "
        f"{REST}"
    )
    attention, mlp = 64 * (64 + 32 + 32 + 64), 3 * 64 * 160
    assert covered.share == pytest.approx(2 * 64 * (64 + 32) / (3 * (attention + mlp)))


def test_a_vision_tower_is_named_whole_and_is_no_part_of_the_share():
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 80}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 56}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    covered = coverage(lora(model, target_modules=(r".*language_model.*(q|k|v|o)_proj",)))
    assert covered.words == (
        f"{QKVO} of 2 layers; frozen: {MLP}, vision_tower, multi_modal_projector, {REST}"
    )
    assert covered.share == pytest.approx(4 * 32 * 32 / (4 * 32 * 32 + 3 * 32 * 64))


def test_what_is_recorded_has_the_sizes_of_each_kind():
    recorded = coverage(adapt(build("mixtral"))).to_dict()
    assert recorded["learns"]["q_proj"] == {"layers": 2, "weights": 2 * 64 * 64}
    assert recorded["frozen"]["experts"] == {"layers": 2, "weights": 2 * 4 * 3 * 64 * 96}
    assert recorded["frozen"]["lm_head"] == {"layers": 0, "weights": 0}
    assert recorded["linear_share"] < 0.5


def test_parameters_of_no_layer_go_by_their_own_names():
    model = adapt(build("mixtral"))
    model.model.layers[0].sinks = nn.Parameter(torch.zeros(4), requires_grad=False)
    assert "sinks" in coverage(model).words.partition("frozen: ")[2].split(", ")
