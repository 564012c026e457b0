"""Fused experts in 4 bits against a model that holds the same values in whole."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.lora.layers import is_quantized, state_of, value_bytes, values_of
from dschat_lora.lora.merge import merged_state_dict
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.lora.nf4 import quantize
from dschat_lora.lora.targets import router_names
from dschat_lora.models.four_bit_base import whole_weights_warning
from dschat_lora.models.loading import load_causal_lm, load_config, share_parameters
from fakecuda.captured import tiny
from helpers.addons import of_addon
from helpers.rounding import assert_same_sums
from helpers.spread import ALL

# Stored expert by expert; stored fused, transposed, with biases; a linear layer as router.
KINDS = ("qwen3_moe", "gpt_oss", "hunyuan_v1_moe")
MORE = ("mixtral", "olmoe", "granitemoe", "glm4_moe", "ernie4_5_moe")
IDS = torch.tensor([[5, 9, 11, 3, 7, 8, 200, 41], [6, 4, 300, 2, 77, 15, 16, 400]])
DISTANCE = of_addon("bases.distance")
ADAPTERS = {
    "every layer": LoraConfig(lora_dim=3),
    "attention alone": LoraConfig(lora_dim=3, target_modules=("q_proj", "v_proj")),
}


@pytest.fixture(scope="module", params=KINDS + MORE if ALL else KINDS)
def pair(request, tmp_path_factory):
    """A base in 4 bits, and its twin of whole weights."""
    directory = str(tmp_path_factory.mktemp(request.param))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny(request.param)).save_pretrained(directory)
    four, twin = (load(directory, bits) for bits in (4, None))
    original = {name: p.detach().clone() for name, p in twin.named_parameters()}
    with torch.no_grad():
        for name, parameter in four.named_parameters():
            twin.get_parameter(name).copy_(values_of(parameter))
    return four, twin, original


def load(directory, bits):
    config = ModelConfig(base_bits=bits, attn_implementation="eager")
    fields = load_config(directory, config)
    return load_causal_lm(directory, fields, config, dtype=torch.float32, meta=False)


def adapted(base, config):
    model = share_parameters(base)
    apply_lora(model, config, seed=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.05, generator=generator)
    return model


def logits(model):
    return model(IDS).logits


def test_experts_are_packed_in_their_order_and_routers_are_not(pair):
    four, _, original = pair
    fused = [name for name, p in four.named_parameters() if len(getattr(p, "nf4", p).shape) == 3]
    assert len(fused) == 4
    for name in fused:
        state = state_of(four.get_parameter(name))
        assert state is not None
        assert state.shape == original[name].shape
        each = [values_of(quantize(w, dtype=w.dtype)) for w in original[name]]
        # Second scales are shared among experts, so that they may differ by their rounding.
        largest = original[name].abs().max()
        off = (values_of(four.get_parameter(name)) - torch.stack(each)).abs().max()
        assert off < 0.02 * largest
    for name in router_names(four):
        assert not is_quantized(four.get_parameter(f"{name}.weight"))


@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS)
def test_logits_gradients_and_the_merged_model_are_those_of_the_values(pair, config):
    four, twin, _ = pair
    with torch.no_grad():
        assert_same_sums(logits(four), logits(twin))
    packed, whole = (adapted(model, config) for model in (four, twin))
    ours, expected = logits(packed), logits(whole)
    torch.testing.assert_close(ours, expected)
    ours.square().sum().backward()
    expected.square().sum().backward()
    gradients = {n: p.grad for n, p in adapter_parameters(whole).items()}
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    for name, parameter in adapter_parameters(packed).items():
        assert_same_sums(parameter.grad, gradients[name])
    merged, plain = merged_state_dict(packed), merged_state_dict(whole)
    assert merged.keys() == plain.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(merged[name], weight)


def test_the_backward_pass_keeps_codes_and_no_values(pair):
    four, _, _ = pair
    model, kept = adapted(four, ADAPTERS["attention alone"]), []

    def note(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits(model)
    shapes = [p.nf4.shape for p in four.parameters() if is_quantized(p) and p.nf4.shape[2:]]
    assert shapes
    for experts, rows, columns in shapes:
        assert {(experts, rows, columns), (experts, columns, rows)}.isdisjoint(kept)


@pytest.mark.parametrize("config", ADAPTERS.values(), ids=ADAPTERS)
def test_rollouts_unpack_experts_once_and_leave_the_codes(pair, config, monkeypatch):
    four, twin, _ = pair
    model = adapted(four, config)
    fast = FastLinears(model, unpacked=True)
    with torch.no_grad():
        expected = logits(adapted(twin, config))
        with fast.in_use():
            assert (
                value_bytes(
                    p for n, p in model.named_parameters() if "experts" in n and "shared" not in n
                )
                == 0
            )
            torch.testing.assert_close(logits(model), expected)
        assert any(is_quantized(p) for n, p in model.named_parameters() if "experts" in n)
        torch.testing.assert_close(logits(model), expected)


@pytest.mark.skipif(not DISTANCE, reason="the add-on is not there")
def test_the_distance_between_two_bases_counts_experts(pair):
    """A 16-bit base computes as the 4-bit one where its weights, experts too, are rounded so."""
    four, twin, original = pair
    whole = share_parameters(twin)
    with torch.no_grad():
        for name, value in original.items():
            parent, _, own = name.rpartition(".")
            module = whole.get_submodule(parent)
            module._parameters[own] = torch.nn.Parameter(value)
        before = logits(whole)
        with DISTANCE[0]._other_weights(whole, DISTANCE[0]._rounded):
            torch.testing.assert_close(logits(whole), logits(four), rtol=1e-4, atol=1e-5)
        assert (before - logits(four)).abs().max() > 1e-4
        assert torch.equal(logits(whole), before)


def saved(directory, kind, change=lambda model: None):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(kind))
    with torch.no_grad():
        change(model)
    model.save_pretrained(directory)
    return model


def test_buffers_of_the_files_are_read_too(tmp_path):
    def draw(model):
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-1, 1, buffer.numel()))

    expected = dict(saved(tmp_path, "glm4_moe", draw).named_buffers())
    names = [name for name in expected if name.endswith("e_score_correction_bias")]
    assert names
    for name in names:
        assert torch.equal(load(str(tmp_path), 4).get_buffer(name), expected[name])


def test_weights_that_four_bits_do_not_reach_are_told_of(pair, tmp_path):
    four, twin, _ = pair
    assert whole_weights_warning(four) is None
    assert whole_weights_warning(twin) is None
    saved(tmp_path, "llama4_text")
    told = whole_weights_warning(load(str(tmp_path), 4))
    assert "% of the weights of the blocks are held in 16 bits, model.layers.0.feed_forward" in told
