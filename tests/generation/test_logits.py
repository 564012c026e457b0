"""Logits of 16-bit models while decoding and in losses, against fp64 products of the head.

A CPU stands in for a GPU, whose 16-bit products can be fp32.
"""

import pytest
import torch
from torch import nn

from dschat_lora.algos import logprobs
from dschat_lora.config.groups import LoraConfig
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.generate import Decoder, decode
from dschat_lora.generation.greedy import greedy_decode
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.architecture_checks import head_is_linear
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss, Policy, fp32_logits
from dschat_lora.models.tensor_parallel import divide
from helpers.tiny import KINDS, VOCAB, tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], list(range(3, 20)), [21]]
# A field of the configuration, and what the model then does to its logits.
TRANSFORMING = {
    "gemma2": (
        {"final_logit_softcapping": 2.0, "sliding_window": 64},
        lambda logits: 2.0 * torch.tanh(logits / 2.0),
    ),
    "granite": ({"logits_scaling": 0.5}, lambda logits: logits / 0.5),
    "cohere": ({"logit_scale": 0.25}, lambda logits: logits * 0.25),
}
FAMILIES = [*KINDS, *TRANSFORMING]
# Logits rounded to 16 bits give log-probabilities that differ by more than 1e-4.
CLOSE = {"rtol": 0, "atol": 5e-6}


@pytest.fixture
def fp32_products(monkeypatch):
    """Products as a GPU has them: of 16-bit matrices in fp32, where that is asked for."""
    plain = torch.mm

    def product(x, y, *, out_dtype=None):
        return plain(x, y) if out_dtype is None else plain(x.to(out_dtype), y.to(out_dtype))

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(logprobs, "_FP32_PRODUCTS", ("cpu",))


def random_model(kind, dtype=torch.bfloat16):
    fields, _ = TRANSFORMING.get(kind, ({}, None))
    return tiny_model(kind, None, **fields).to(dtype)


def watch_head(model):
    """Lists of what its head is given and gives, which grow."""
    given, results = [], []

    def note(head, inputs, output):
        given.append(inputs[0])
        results.append(output)

    model.get_output_embeddings().register_forward_hook(note)
    return given, results


def logprobs_by_hand(model, kind, hidden):
    """(..., V) of (..., H) hidden states, in fp64."""
    head = model.get_output_embeddings()
    bias = None if getattr(head, "bias", None) is None else head.bias.double()
    logits = nn.functional.linear(hidden.double(), head.weight.double(), bias)
    return TRANSFORMING.get(kind, (None, lambda x: x))[1](logits).log_softmax(-1)


def picked(table, tokens):
    return table.gather(-1, torch.tensor(tokens)[..., None])[..., 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_samplers_logprobs_are_those_of_unrounded_logits(kind, dtype, fp32_products):
    model = random_model(kind, dtype)
    given, _ = watch_head(model)
    decoder = Decoder(model, eos_ids=[], pad_id=0, device=CPU)
    seeds = [[n] for n in range(len(PROMPTS))]
    responses = decoder(PROMPTS, Sampling(8), seeds=seeds, keep_logprobs=True)
    hidden = torch.stack([each[:, -1] for each in given], 1)
    expected = picked(logprobs_by_hand(model, kind, hidden), responses.tokens())
    torch.testing.assert_close(torch.tensor(responses.logprobs()).double(), expected, **CLOSE)


def trained_logprobs(model, kind, ids, **options):
    policy = Policy(model, **options)
    policy.full_logits = not head_is_linear(model, vocab_size=VOCAB, device=CPU)
    assert policy.full_logits or kind not in ("granite", "gemma2", "cohere")
    count = len(ids) - 1
    row = torch.tensor([ids])
    return policy(
        row,
        torch.arange(len(ids))[None],
        torch.ones_like(row),
        torch.arange(count),
        row[0, 1:],
        1.0,
    )[0]


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "entropy trains"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_policys_logprobs_are_those_of_unrounded_logits(kind, trains, fp32_products):
    model, ids = random_model(kind), PROMPTS[2]
    with torch.no_grad():
        hidden = []
        model.base_model.register_forward_hook(lambda *args: hidden.append(args[-1][0]))
        logprobs = trained_logprobs(model, kind, ids, entropy_trains=trains)
    expected = picked(logprobs_by_hand(model, kind, hidden[-1][0, :-1]), ids[1:])
    torch.testing.assert_close(logprobs.double(), expected, **CLOSE)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_unrounded_logits_have_the_gradients_of_the_product(bias, fp32_products):
    generator = torch.Generator().manual_seed(0)
    sizes = [(7, 16), (11, 16), (11,)][: 2 + bias]
    leaves = [torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in sizes]
    weights = torch.randn(7, 11, generator=generator)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (nn.functional.linear(*doubles) * weights).sum().backward()
    logits = logprobs.head_logits(*leaves, *([] if bias else [None]))
    assert logits.dtype == torch.float32
    (logits * weights).sum().backward()
    for leaf, double in zip(leaves, doubles, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf.grad.double(), double.grad, rtol=2e-2, atol=2e-2)


def slot_rows(model):
    rows = SlotRows(model, pad_id=0)
    with torch.inference_mode(), rows.kernels():
        rows.join(PROMPTS, [0] * len(PROMPTS))
        rows.step([5] * len(PROMPTS))


class Padding:
    pad_token_id = 0


WAYS = {
    "sampled": lambda model: decode(
        model, PROMPTS, Sampling(2), seeds=[[0]] * 4, eos_ids=[], pad_id=0, device=CPU
    ),
    "batched": slot_rows,
    "greedy": lambda model: greedy_decode(
        model, Padding(), PROMPTS, eos_ids=[2], max_new_tokens=2, device=CPU
    ),
}


@pytest.mark.parametrize(
    ("way", "kind"), [*((way, "opt") for way in WAYS), ("sampled", "bloom")], ids="{}".format
)
def test_every_way_of_decoding_has_unrounded_logits(way, kind, fp32_products):
    check_logits_are_unrounded(random_model(kind), WAYS[way])


def check_logits_are_unrounded(model, way):
    given, results = watch_head(model)
    way(model)
    assert len(given) > 1
    assert "forward" not in vars(model.get_output_embeddings())
    weight = model.get_output_embeddings().weight.double()
    for hidden, logits in zip(given, results, strict=True):
        torch.testing.assert_close(logits.double(), hidden.double() @ weight.T, **CLOSE)


def test_a_divided_heads_logits_are_gathered_before_anything_is_rounded(fp32_products, monkeypatch):
    # The other rank's words have the logits of the first 30 of this one's 31.
    monkeypatch.setattr(TensorGroup, "gather", lambda self, own: [own, own])
    model = random_model("llama")
    divide(model, TensorGroup(None, 0, 2))
    head = model.get_output_embeddings()
    hidden = torch.randn(2, 3, 32).bfloat16()
    with fp32_logits(model), torch.no_grad():
        logits = head(hidden)
    own = hidden.double() @ head.weight.double().T
    torch.testing.assert_close(logits.double(), torch.cat([own, own[..., :30]], -1), **CLOSE)


def test_heads_that_losses_call_and_those_of_fp32_stay_as_they_are():
    adapted = random_model("llama")
    apply_lora(adapted, LoraConfig(lora_dim=2, target_modules=("lm_head",)), seed=0)
    for model in (adapted, random_model("llama", torch.float32)):
        with FastLinears(model).in_use():
            before = model.get_output_embeddings().forward
            with fp32_logits(model):
                assert model.get_output_embeddings().forward is before
            assert model.get_output_embeddings().forward is before


@pytest.mark.parametrize("network", [CausalLMLoss, CausalLMLogprobs])
def test_whole_logits_of_other_losses_are_not_rounded(network, fp32_products):
    model = random_model("granite")
    network = network(model)
    network.full_logits = True
    _, results = watch_head(model)
    row = torch.tensor([PROMPTS[2]])
    places, ones = torch.arange(16), torch.ones_like(row)
    extra = [torch.zeros_like(row)] if isinstance(network, CausalLMLogprobs) else []
    network(row, torch.arange(17)[None], ones, *extra, places, row[0, 1:])
    assert [each.dtype for each in results] == [torch.float32]
