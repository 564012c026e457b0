"""Linear layers that are packed, stacked or merged for decoding, against the layers as they are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.lora.model import adapter_layers
from dschat_lora.models.loading import share_parameters
from generation.test_generate import GREEDY, lively, run
from helpers.decoding import PROMPTS, generated
from helpers.rounding import assert_same_sums
from helpers.tiny import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("products", [0, 2**40], ids=["oneDNN", "plain"])
def test_quick_linear_layers_compute_what_they_did(kind, products, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.fast_linears.MIN_PACKED_PRODUCTS", products)
    model = lively(kind)
    layer = next(iter(adapter_layers(model).values()))
    if layer.bias is not None:
        layer.trained_bias = torch.nn.Parameter(torch.randn_like(layer.bias))
    ids = torch.tensor([PROMPTS[3], PROMPTS[3][::-1]])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with FastLinears(model).in_use():
            assert "forward" in vars(layer)
            logits = model(input_ids=ids).logits
    assert_same_sums(logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["opt", "llama", "qwen2"])
def test_one_product_computes_all_layers_that_read_one_input(kind):
    model = lively(kind)
    ids = torch.tensor([PROMPTS[0]])
    linears, before = FastLinears(model, stacked=True), model(ids).logits
    for scale in (1.0, 1.5):  # the second time as after a step
        for layer in adapter_layers(model).values():
            layer.lora_B.mul_(scale)
        expected = model(ids).logits
        with Count() as count, linears.in_use():
            assert_same_sums(model(ids).logits, expected)
        # Of q, k and v; output; one or two up; down: their weights with first factors, and second
        # factors of each. Then the head.
        wide = 6 if kind == "opt" else 7
        assert count.products == model.config.num_hidden_layers * (4 + wide) + 1
    assert torch.equal(before, lively(kind)(ids).logits), "moved weights are as they were"
    layers, stacks = adapter_layers(model).values(), linears._stacks.values()
    second = sum(layer.lora_B.numel() for layer in layers)
    assert sum(stack.up.numel() for stack in stacks) == second, "no zeros beside them"


@torch.no_grad()
def test_models_of_one_base_share_the_places_of_its_weights():
    base = lively("opt").double()
    twin = share_parameters(base)
    ids, weight = torch.tensor([PROMPTS[0]]), base.model.decoder.layers[0].fc1.weight
    for layer in adapter_layers(twin).values():
        layer.lora_A = torch.nn.Parameter(torch.randn(layer.r, layer.in_features).double())
    expected = [model(ids).logits for model in (base, twin)]
    assert not torch.equal(*expected)
    linears = [FastLinears(model, stacked=True) for model in (base, twin)]
    place = weight.data_ptr()
    for number in (0, 1, 0):
        with linears[number].in_use():
            logits = (base, twin)[number](ids).logits
        torch.testing.assert_close(logits, expected[number])
    FastLinears(base, stacked=True)
    assert weight.data_ptr() == place


@torch.no_grad()
@pytest.mark.parametrize("kind", ["opt", "llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("share", [False, True])
def test_merged_copies_give_what_layers_with_adapters_give(kind, share):
    model = lively(kind)
    ids, before = torch.tensor([PROMPTS[0]]), model.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    linears = FastLinears(model, stacked=share, merged=True)
    for scale in (1.0, 1.5):  # the second time as after a step
        for layer in adapter_layers(model).values():
            layer.lora_B.mul_(scale)
        expected = model(ids).logits
        with Count() as plain, FastLinears(model).in_use():
            model(ids)
        with Count() as merged, linears.in_use():
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert merged.products < plain.products
    for name, tensor in model.state_dict().items():
        if not name.endswith("lora_B"):
            assert torch.equal(tensor, before[name])


@torch.no_grad()
def test_merged_copies_in_16_bits_are_their_sum_in_the_mean_and_a_function_of_what_is_asked_for():
    model, asked = lively("opt").bfloat16(), [0]
    linears = FastLinears(model, stacked=True, merged=True, rounding=lambda: asked[0])
    _, layer = linears._merged[0]
    layer.lora_B.mul_(1e-4)  # most of which rounding to the nearest would lose
    layer.weight[0], layer.lora_B[0] = 1.0, 0.0
    copies = []
    for asked[0] in [*range(200), 0]:
        with linears.in_use():
            copies.append(linears._merged[0][0].clone())
    assert torch.equal(copies[0], copies[200])
    assert not torch.equal(copies[0], copies[1])
    assert (copies[5][0] == 1).all()
    weight, update = layer.weight.double(), layer.scaling * (layer.lora_B @ layer.lora_A).double()
    mean, nearest = torch.stack(copies[:200]).double().mean(0), (weight + update).bfloat16()
    parts = [((each - weight) * update).sum() / update.square().sum() for each in (mean, nearest)]
    assert parts[0] == pytest.approx(1, abs=0.05)
    assert parts[1] < 0.5


@torch.no_grad()
def test_a_layer_that_is_given_another_input_reads_its_own():
    model = lively("opt")
    attention = model.model.decoder.layers[0].self_attn
    x, y = torch.randn(2, 3, model.config.hidden_size)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    inputs = [(x, y, x), (x, x, y), (y, x, x)]
    expected = [[f(z) for f, z in zip(layers, each, strict=True)] for each in inputs]
    with FastLinears(model, stacked=True).in_use():
        outputs = [[f(z) for f, z in zip(layers, each, strict=True)] for each in inputs]
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


class Count(TorchDispatchMode):
    """Counts matrix products."""

    products = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.products += operation._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("whole", "here", "sharded"),
    [(None, None, False), (8, 8, False), (8, 0, True)],
    ids=["no ZeRO 3", "gathered", "in shards"],
)
def test_weights_that_are_shards_outside_a_forward_are_not_prepared(whole, here, sharded):
    model = lively("opt")
    layer = next(iter(adapter_layers(model).values()))
    if whole is not None:
        # As ZeRO 3 marks them: what is in shards here has fewer numbers than the whole.
        layer.weight.ds_numel = layer.weight.numel() + whole - here
    prepared = []
    model.register_forward_pre_hook(lambda *_: prepared.append("forward" in vars(layer)))
    texts = run(model, PROMPTS, GREEDY)
    assert set(prepared) == {not sharded}
    assert texts == [[generated(model, prompt, 12)] for prompt in PROMPTS]
