"""Norms and rotary embeddings by fewer kernels, against transformers' own operations."""

import copy
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.kernels import support
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.fused import fuse_kernels
from dschat_lora.models.reward_model import load_reward_model
from helpers.kinds import tiny_config

KINDS = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi", "olmo2", "qwen3_moe"]


@pytest.fixture
def plain(monkeypatch):
    """Makes a tiny model; what rotates for its type is put back afterwards."""

    def make(kind):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        home = sys.modules[type(model).__module__]
        if hasattr(home, "apply_rotary_pos_emb"):
            monkeypatch.setattr(home, "apply_rotary_pos_emb", home.apply_rotary_pos_emb)
        return model

    return make


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[str(operation.overloadpacket)] += 1
        return operation(*args, **(kwargs or {}))


def values_of(model):
    """Logits with and without gradients, and the gradients of all parameters."""
    ids = torch.arange(34).view(2, 17) % 40 + 5
    model.zero_grad()
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return {"logits": output.logits, "evaluated": model(ids).logits} | gradients


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_plain_operations(kind, plain):
    model = plain(kind)
    expected, names = values_of(model), [*model.state_dict()]
    replaced = fuse_kernels(model, on_cpu=True)
    rotates = [name for name in replaced if name.endswith("apply_rotary_pos_emb")]
    assert len(rotates) == 1
    assert any("Norm" in name for name in replaced) == (kind != "phi"), "phi has layer norms"
    gates = ("phi", "gemma2", "gemma3_text", "qwen3_moe")  # which have none, or GELU
    assert any(name.endswith("MLP") for name in replaced) == (kind not in gates)
    assert [*model.state_dict()] == names
    assert {type(m).__name__ for m in model.modules() if "RMSNorm" in type(m).__name__} <= {
        *replaced
    }
    for values in (values_of(model), values_of(copy.deepcopy(model))):
        for name, value in expected.items():
            error = (values[name] - value).norm() / value.norm()
            assert error < 1e-5, name


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_adapted_experts_gate_by_one_kernel_where_they_gate_by_silu(kind, plain):
    model = plain(kind)
    apply_lora(model, LoraConfig(lora_dim=4), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(0, 0.1)
    expected = values_of(model)
    fuse_kernels(model, on_cpu=True)
    for fuses in (True, False):
        with Operations() as seen:
            values = values_of(model)
        for name, value in expected.items():
            error = (values[name] - value).norm() / value.norm()
            assert error < 1e-5, name
        assert bool(seen.counts["dschat_lora.swiglu"]) == (fuses and kind == "qwen3_moe")
        for module in model.modules():
            vars(module).pop("fuses_gate", None)


@pytest.mark.parametrize("kind", ["glm4", "cohere"])
def test_what_computes_something_else_is_left_as_it_is(kind, plain):
    model = plain(kind)
    home = sys.modules[type(model).__module__]
    rotate, before = home.apply_rotary_pos_emb, values_of(model)
    fuse_kernels(model, on_cpu=True)
    assert home.apply_rotary_pos_emb is rotate
    after = values_of(model)
    assert all(torch.allclose(after[name], value, atol=1e-5) for name, value in before.items())


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
def test_norms_without_a_weight_stay_beside_those_that_have_one(first, plain):
    model = plain("llama")
    kind = type(model.model.norm)

    class SomeRMSNorm(kind):
        def __init__(self, *args, scales=True):
            super().__init__(*args)
            if not scales:
                del self.weight

        def forward(self, x):
            if "weight" in self._parameters:
                return super().forward(x)
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    model.norms = torch.nn.ModuleList(SomeRMSNorm(16, scales=each) for each in (first, not first))
    x = torch.randn(3, 16)
    expected = [norm(x) for norm in model.norms]
    assert "SomeRMSNorm" in fuse_kernels(model, on_cpu=True)
    for norm, value in zip(model.norms, expected, strict=True):
        assert torch.allclose(norm(x), value, atol=1e-6)


def test_a_cpu_computes_as_before_unless_it_is_asked_to(plain):
    model = plain("llama")
    expected = values_of(model)
    assert fuse_kernels(model)
    assert all(torch.equal(value, expected[name]) for name, value in values_of(model).items())


def test_a_norm_that_is_given_more_than_its_input_computes_by_itself(plain):
    model = plain("llama")

    class GatedRMSNorm(type(model.model.norm)):
        def forward(self, x, gate=None):
            x = super().forward(x)
            return x if gate is None else x * gate

    model.model.norm.__class__ = GatedRMSNorm
    fuse_kernels(model, on_cpu=True)
    x = torch.randn(3, model.config.hidden_size)
    assert torch.allclose(model.model.norm(x, 2.0), 2 * model.model.norm(x), atol=1e-6)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rotations_of_any_sines_are_those_of_the_function(
    rotary, dim, by_kernel, plain, monkeypatch
):
    monkeypatch.setattr(support, "ON_CPU", by_kernel)
    model = plain("gpt_neox")  # whose function rotates the first entries alone, where cos has fewer
    home = sys.modules[type(model).__module__]
    rotate = home.apply_rotary_pos_emb
    fuse_kernels(model, on_cpu=True)
    assert home.apply_rotary_pos_emb is not rotate
    q, k = torch.randn(2, 5, 6, 8).split([4, 2], dim=2)
    cos, sin = torch.randn(2, 2, 5, rotary)
    grads = [torch.randn(2, 5, heads, 8) for heads in (4, 2)]
    if dim == 1:
        q, k, *grads = (x.transpose(1, 2) for x in (q, k, *grads))
    with torch.no_grad():
        pairs = [f(q, k, cos, sin, dim) for f in (rotate, home.apply_rotary_pos_emb)]
    leaves = [[x.clone().requires_grad_() for x in (q, k)] for _ in range(2)]
    for (q, k), f in zip(leaves, (rotate, home.apply_rotary_pos_emb), strict=True):
        torch.autograd.backward(f(q, k, cos, sin, unsqueeze_dim=dim), grads)
    for expected, ours in zip(*pairs, strict=True):
        assert torch.allclose(ours, expected, atol=1e-6)
    for expected, ours in zip(*leaves, strict=True):
        assert torch.allclose(ours.grad, expected.grad, atol=1e-6)


def test_a_norm_of_weights_of_another_type_computes_by_itself(plain):
    model = plain("llama")
    norm, x = model.model.norm, torch.randn(3, model.config.hidden_size).bfloat16()
    expected = norm(x)
    fuse_kernels(model, on_cpu=True)
    assert norm(x).dtype == expected.dtype == torch.float32
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("shares", [False, True])
def test_a_reward_model_and_a_critic_on_the_base_of_others_compute_by_fewer_kernels(
    shares, plain, tmp_path
):
    model = plain("llama")
    base = model if shares else None
    model.save_pretrained(tmp_path)
    scores = {}
    for fused in ("on", "off"):
        scorer = load_reward_model(
            str(tmp_path),
            tiny_config("llama"),
            ModelConfig(fused_kernels=fused),
            dtype=torch.float32,
            seed=0,
            meta=False,
            base=base,
        )
        few = [each for each in scorer.modules() if getattr(each, "keeps_least", False)]
        scores[fused] = scorer(torch.arange(34).view(2, 17) % 40 + 5).logits, len(few)
    torch.testing.assert_close(scores["on"][0], scores["off"][0])
    # Two norms and an MLP of each of two blocks, and the last norm.
    assert (scores["on"][1], scores["off"][1]) == (2 * 3 + 1, 0)
