"""FLOPs, memory and caches of mixtures of experts and other types, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from test_memory import estimate, kept_bytes
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.perf.memory import cached_token_bytes
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import forward_flops, step_flops
from helpers.perf_models import VOCAB, checkpoint, executed_flops, flop_counter
from helpers.spread import ALL

ROWS, LENGTH = 2, 24
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 1,
}
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 24, "qk_nope_head_dim": 8}
_LATENT |= {"qk_rope_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
# Fused experts, beside them shared ones, dense layers by number, by step and by list, latent
# attention, transposed weights, gates alone, a head dimension of each layer.
TYPES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_FOUR, "mlp_only_layers": [0]},
    "qwen2_moe": {**_FOUR, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 48},
    "olmoe": {**_FOUR, "num_experts_per_tok": 3},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_FOUR, **_ROUTED, "first_k_dense_replace": 1},
    "deepseek_v3": {**_FOUR, **_ROUTED, **_LATENT, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOWS},
    "gemma4_text": {
        **_WINDOWS,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "phi3": {},
}
_BOTH = ("gate_up_proj", "down_proj")
COUNTS = {
    "num_tokens": ROWS * LENGTH,
    "num_attended": ROWS * LENGTH**2,
    "num_targets": ROWS * LENGTH,
}


def build(kind, attn="eager", experts="eager", **changes):
    default = AutoConfig.for_model(kind)
    sizes = {k: v for k, v in SIZE.items() if _has(default, k)} | TYPES[kind] | changes
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **sizes), attn_implementation=attn
    )
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        model.set_experts_implementation(experts)
    return model


def _has(config, name):
    try:
        return hasattr(config, name)
    except RuntimeError:  # each layer has its own
        return False


def adapt(model, *targets, experts=0):
    """Adapters of rank 4, and of another rank in experts."""
    options = {"target_modules": targets or ("all-linear",), "expert_lora_dim": experts}
    apply_lora(model, LoraConfig(lora_dim=4, **options), seed=0)
    return model


def counted(model, *, checkpointing=False):
    return step_flops(describe(model), **COUNTS, gradient_checkpointing=checkpointing).hardware


@pytest.mark.parametrize("variant", ["full", "LoRA"] if ALL else ["LoRA"])
@pytest.mark.parametrize("kind", TYPES)
def test_flops_of_types_with_experts_are_those_torch_executes(kind, variant):
    model = build(kind)
    if variant == "LoRA":
        adapt(model)
    executed = executed_flops(model, rows=ROWS, length=LENGTH)
    assert counted(model) == pytest.approx(executed, rel=1e-9)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_adapters_of_experts_alone_owe_gradients_from_there_on(kind):
    """In the first block nothing needs a gradient but what comes after the experts' input."""
    model = build(kind)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts.down_proj" in name)
    executed = executed_flops(model, rows=ROWS, length=LENGTH)
    assert counted(model) == pytest.approx(executed, rel=1e-9)


class Factors(nn.Module):
    """The weights of all experts with low-rank updates, one expert at a time."""

    def __init__(self, weight, r, *, transposed, enabled=True):
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.num_experts, self.transposed, self.enabled = len(weight), transposed, enabled
        rows, columns = weight.shape[1:]
        self.in_features, self.out_features = (rows, columns) if transposed else (columns, rows)
        self.r, self.scaling = r, 2.0
        self.lora_A = nn.Parameter(torch.randn(self.num_experts, r, self.in_features))
        self.lora_B = nn.Parameter(torch.randn(self.num_experts, self.out_features, r))

    def of(self, expert, x):
        weight = self.weight[expert].T if self.transposed else self.weight[expert]
        y = F.linear(x, weight)
        if not self.enabled:
            return y
        return y + self.scaling * F.linear(F.linear(x, self.lora_A[expert]), self.lora_B[expert])


class LoopExperts(nn.Module):
    """Experts whose weights are modules, in a plain loop."""

    def __init__(self, experts, r, names=_BOTH, **options):
        super().__init__()
        self.num_experts, self.is_transposed = experts.num_experts, experts.is_transposed
        for name in _BOTH:
            held = Factors(getattr(experts, name), r, transposed=experts.is_transposed, **options)
            if name not in names:
                held.enabled = False
                del held.lora_A, held.lora_B
            setattr(self, name, held)

    def forward(self, hidden, indices, weights):
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            tokens, place = torch.where(indices == expert)
            gate, up = self.gate_up_proj.of(expert, hidden[tokens]).chunk(2, dim=-1)
            y = self.down_proj.of(expert, F.silu(gate) * up)
            result = result.index_add(0, tokens, y * weights[tokens, place, None])
        return result


def adapt_experts(model, r=3, **options):
    model.requires_grad_(False)
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if hasattr(experts, "gate_up_proj"):
            module.experts = LoopExperts(experts, r, **options)
    return model


@pytest.mark.parametrize(
    "names", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")]
)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_factors_of_experts_cost_what_torch_executes_for_those_routed_to(kind, names):
    model = adapt_experts(build(kind), names=names)
    executed = executed_flops(model, rows=ROWS, length=LENGTH)
    assert counted(model) == pytest.approx(executed, rel=1e-9)


def test_factors_that_are_switched_off_cost_nothing():
    off = adapt_experts(build("qwen3_moe"), enabled=False)
    plain = build("qwen3_moe")
    plain.requires_grad_(False)
    assert counted(off) == counted(plain)


def test_a_token_through_a_block_of_experts_by_hand():
    """Hidden 64, of 4 experts 2 of width 32: 2 (64 (2 * 32) + 32 * 64) 2, the router 2 * 64 * 4.

    The block before it is dense: 3 products of 64 x 96. Attention 64 (64 + 2 * 32 + 64).
    """
    attention, head = 2 * 64 * (64 + 2 * 32 + 64), 2 * 64 * VOCAB
    sparse, dense = 2 * 2 * (64 * 64 + 32 * 64) + 2 * 64 * 4, 2 * 3 * 64 * 96
    flops = forward_flops(describe(build("qwen3_moe")), num_tokens=1, num_attended=0, num_targets=1)
    assert flops.model == 2 * attention + sparse + dense + head


class ListedExperts(nn.Module):
    """A mixture whose experts are modules in a list, as models from the hub have them."""

    def __init__(self, router, number, width, inner):
        super().__init__()
        self.gate, self.top_k = nn.Linear(width, number, bias=False), router
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, inner), "down": nn.Linear(inner, width)})
            for _ in range(number)
        )

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        weights, indices = self.gate(flat).softmax(-1).topk(self.top_k)
        result = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            tokens, place = torch.where(indices == i)
            y = expert["down"](F.relu(expert["up"](flat[tokens])))
            result = result.index_add(0, tokens, y * weights[tokens, place, None])
        return result.view_as(hidden)


@pytest.mark.parametrize("targets", [None, ("all-linear",), ("up", "q_proj")])
def test_experts_that_are_modules_of_their_own_count_by_the_share_of_them_that_a_token_takes(
    targets, monkeypatch
):
    """Tokens are spread evenly here, as is taken for granted."""
    model = build("qwen3_moe", mlp_only_layers=[0, 1])
    for layer in model.model.layers:
        layer.mlp = ListedExperts(2, 4, 64, 32)
    if targets:
        adapt(model, *targets, experts=2)

    def evenly(scores, k):
        tokens = torch.arange(len(scores))[:, None]
        return scores[:, :k], (tokens + torch.arange(k)) % scores.shape[1]

    monkeypatch.setattr(torch.Tensor, "topk", evenly)
    executed = executed_flops(model, rows=ROWS, length=LENGTH)
    assert counted(model) == pytest.approx(executed, rel=1e-9)


def test_a_mixture_that_does_not_say_how_many_experts_a_token_takes_is_refused_by_name():
    model = build("qwen3_moe", mlp_only_layers=[0, 1])
    vars(model.config)["num_experts_per_tok"] = None
    model.model.layers[0].mlp = ListedExperts(None, 4, 64, 32)
    with pytest.raises(ValueError, match=r"active experts per token \(of 4\) is unknown"):
        describe(model)


@pytest.mark.parametrize("variant", ["full", "LoRA", "q and v"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "granitemoe"])
def test_activations_of_routed_experts_are_what_autograd_keeps(kind, variant):
    model = build(kind, attn="sdpa", experts="grouped_mm")
    if variant != "full":
        adapt(model, *(("q_proj", "v_proj") if variant == "q and v" else ()))
        model.enable_input_require_grads()
    assert estimate(model).activations == pytest.approx(kept_bytes(model), rel=0.05)


def test_weights_of_all_experts_are_held_and_activations_of_those_routed_to():
    few, many = (build("mixtral", num_local_experts=n) for n in (4, 8))
    each = 3 * 64 * 96 * 4
    assert estimate(many).weights - estimate(few).weights == 2 * (4 * each + 4 * 64 * 4)
    router = 2 * 4 * 4  # the softmax of 4 more scores in fp32, in two layers
    positions = 4 * 48
    assert estimate(many).activations - estimate(few).activations == router * positions


CACHED = [("qwen3_moe", {}), ("deepseek_v3", {}), ("phi3", {}), ("gemma4_text", {})]
CACHED += [("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1})]


@pytest.mark.parametrize(("kind", "changes"), CACHED)
def test_a_cached_token_takes_what_transformers_cache_grows_by(kind, changes):
    model = build(kind, **changes).eval()
    sizes = [_cache_bytes(model, length) for length in (5, 9)]
    assert cached_token_bytes(model) == (sizes[1] - sizes[0]) / 4


@torch.no_grad()
def _cache_bytes(model, length):
    cache = model(input_ids=torch.full((1, length), 5), use_cache=True).past_key_values
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def test_a_forward_pass_of_a_vision_language_model_on_text_leaves_out_its_vision_tower():
    text = SIZE | _WINDOWS
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 56}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad(), flop_counter() as counter:
        model(input_ids=torch.randint(3, VOCAB, (ROWS, LENGTH)))
    executed = counter.get_total_flops()
    assert forward_flops(describe(model), **COUNTS).hardware == executed
    # Beside the text model, by its place, and at the top by its name.
    model.model.connector, model.visual = nn.Linear(64, 64), nn.Linear(64, 64)
    assert forward_flops(describe(model), **COUNTS).hardware == executed


def test_what_no_count_understands_is_named():
    changes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    config = AutoConfig.for_model(
        "qwen3_next",
        **SIZE | _FOUR | changes,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config)
    assert describe(model).uncounted == "the recurrence of 1 of 2 layers"
    assert describe(build("mixtral")).uncounted == ""
    mixed = build("mixtral")
    mixed.model.layers[0].mlp.mixing = nn.Parameter(torch.zeros(3, 3))
    assert describe(mixed).uncounted == "products with mixing"


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_the_packages_adapters_of_experts_are_counted(kind, checkpointing):
    """In float64 each expert's products are torch's own, which its counter sees."""
    model = adapt(build(kind).double(), experts=3)
    if checkpointing:
        checkpoint(model)
    executed = executed_flops(model, rows=ROWS, length=LENGTH)
    assert counted(model, checkpointing=checkpointing) == pytest.approx(executed, rel=1e-9)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_activations_of_the_packages_adapters_of_experts_are_what_autograd_keeps(kind):
    model = adapt(build(kind, attn="sdpa", experts="grouped_mm"), experts=4)
    model.enable_input_require_grads()
    assert estimate(model).activations == pytest.approx(kept_bytes(model), rel=0.05)
