"""The GPU's way of attending, with a slow loop in place of its kernel."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations import flex_attention as flex_integration

from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.samples import SequenceSample
from dschat_lora.models import attention
from dschat_lora.models import backbone as backbone_module
from dschat_lora.models.backbone import Backbone
from helpers.pairs import ragged_pairs
from helpers.spread import ALL
from helpers.tiny import ragged_samples, tiny_model

WINDOW = 3
KINDS = ("opt", "gpt2", "neox", "llama", "sliding")


def model_of(kind):
    if kind != "sliding":
        return tiny_model(kind).double()
    kinds = ["full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    return tiny_model("qwen2", **window).double()


def slowly(query, key, value, ends, longest, scale, window):
    """Causal attention of each sequence to its last so many keys and one, query by query."""
    assert [*longest] == [int(each.diff().max()) for each in ends]
    assert ends[1][-1] == len(key) == len(value)
    (left, right), group, outputs = window, query.shape[1] // key.shape[1], []
    assert right == 0
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    counts = [each.diff().tolist() for each in ends]
    parts = zip(query.split(counts[0]), key.split(counts[1]), value.split(counts[1]), strict=True)
    for q, k, v in parts:
        for i in range(len(q)):
            # the last query stands where the last key does
            place = len(k) - len(q) + i
            seen = slice(0 if left == -1 else max(0, place - left), place + 1)
            keys, values = (x[seen].repeat_interleave(group, dim=1) for x in (k, v))
            weights = (scale * torch.einsum("hd,khd->hk", q[i], keys)).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outputs)


class SlowKernel:
    """What torch says of ``varlen_attn``."""

    def __init__(self):
        self.windows = []

    def __call__(self, q, k, v, ends_q, ends_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert enable_gqa or q.shape[1] == k.shape[1]
        self.windows.append(window_size)
        return slowly(q, k, v, (ends_q, ends_k), (max_q, max_k), scale, window_size)


@pytest.fixture
def on_gpu(monkeypatch):
    """Every device counts as one that has the kernel."""
    for module in (attention, backbone_module):
        monkeypatch.setattr(module, "has_varlen", lambda device, dtype: True)


def batches():
    samples = ragged_samples(5, longest=9)
    long = max(samples, key=lambda sample: len(sample.input_ids))
    # One token more than the window spans.
    samples.append(SequenceSample.of(long.input_ids[: WINDOW + 1], long.labels[: WINDOW + 1]))
    pairs = [each.sample() for each in ragged_pairs(3, longest=5)]
    yield SampleCollator(0)([samples[:2], samples[2:]])
    yield PairCollator(0, "shared")([pairs[:2], pairs[2:]])


def run(model, backbone):
    """Loss, and gradients of every weight."""
    loss = 0.0
    for batch in batches():
        inputs = batch.input_ids, batch.position_ids, batch.segment_ids
        hidden = backbone(*inputs, getattr(batch, "branch_ids", None), batch.spans)
        real = hidden[batch.segment_ids > 0].double()
        weights = torch.randn(real.shape, generator=torch.Generator().manual_seed(3))
        loss = loss + (real * weights).sum() / len(real)
    loss.backward()
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run_of(kind, checkpointing):
    """That of a model of the kind."""
    model = model_of(kind)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return run(model, Backbone(model))


def assert_as_by_mask(kind, loss, gradients, monkeypatch):
    """Loss and gradients are those by a dense mask."""
    model = model_of(kind)
    backbone = Backbone(model)
    monkeypatch.setattr(backbone, "by_spans", False)
    expected_loss, expected = run(model, backbone)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == expected.keys()
    norm = torch.nn.utils.get_total_norm(expected.values())
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-6 * norm, name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_a_layer_gives_the_loss_and_gradient_of_a_dense_mask(
    kind, checkpointing, on_gpu, monkeypatch
):
    kernel = SlowKernel()
    monkeypatch.setattr(attention, "kernel", lambda: kernel)
    loss, gradients = run_of(kind, checkpointing)
    whole = (-1, 0)
    second = (WINDOW - 1, 0) if kind == "sliding" else whole
    assert sorted(kernel.windows) == sorted([whole, second] * 2 * (2 if checkpointing else 1))
    assert_as_by_mask(kind, loss, gradients, monkeypatch)


@pytest.mark.skipif(attention.kernel() is None, reason="this torch has no such implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_back_from_the_device(kind, on_gpu, monkeypatch):
    # On the meta device there is nothing to read: whatever asks for a value fails.
    monkeypatch.setattr(attention, "sdpa_attention_forward", None)
    model = model_of(kind).bfloat16().to("meta")
    backbone = Backbone(model)
    for batch in batches():
        moved = batch.to("meta")
        inputs = moved.input_ids, moved.position_ids, moved.segment_ids
        branches = getattr(moved, "branch_ids", None)
        hidden = backbone(*inputs, branches, moved.spans)
        assert hidden.shape == (*batch.input_ids.shape, 32)
        hidden.sum().backward()
        with pytest.raises(NotImplementedError):
            backbone(*inputs, branches)


@pytest.mark.parametrize(
    ("options", "size", "fits"),
    [
        ({"scaling": 0.5, "dropout": 0.0, "sliding_window": 7, "use_cache": False}, 64, True),
        ({"is_causal": True, "position_ids": torch.zeros(1, 3), "softcap": None}, 64, True),
        ({"dropout": 0.1}, 64, False),
        ({"softcap": 30.0}, 64, False),
        ({"s_aux": torch.zeros(4)}, 64, False),
        ({"is_causal": False}, 64, False),
        ({}, 12, False),
        ({}, 256, False),
        ({}, 80, True),
    ],
)
def test_the_kernel_is_asked_for_what_it_does_alone(options, size, fits, on_gpu):
    query = torch.zeros(1, 4, 3, size)
    assert attention.varlen_takes(query, query, query, options) is fits
    assert not attention.varlen_takes(query, query, torch.zeros(1, 4, 3, size - 8), options)


def flash_attn_varlen_func(q, k, v, *given, softmax_scale, causal, window_size):
    """What FlashAttention 3 says of it."""
    *ends, longest_q, longest_k = given
    assert causal is True
    assert {each.dtype for each in ends} == {torch.int32}
    attended = slowly(q, k, v, ends, (longest_q, longest_k), softmax_scale, window_size)
    return attended, torch.zeros(len(q))


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_long_sequences_attend_by_flash_attention_3(kind, on_gpu, monkeypatch):
    calls = []

    def flash(*given, **options):
        calls.append(given[0].shape)
        return flash_attn_varlen_func(*given, **options)

    slow = SlowKernel()
    monkeypatch.setattr(attention, "kernel", lambda: slow)
    monkeypatch.setattr(attention, "flash_3", lambda device: flash)
    monkeypatch.setattr(attention, "LONG", 7)
    loss, gradients = run_of(kind, checkpointing=False)
    assert calls, "of samples up to 9 tokens"
    assert_as_by_mask(kind, loss, gradients, monkeypatch)
    calls.clear()
    monkeypatch.setattr(attention, "LONG", 100)
    run_of(kind, checkpointing=False)
    assert not calls
    assert slow.windows


def test_flash_attention_3_is_for_hopper_where_it_is_installed(monkeypatch):
    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    modules = {"flash_attn_interface": module}
    for capability, installed, taken in [
        ((9, 0), True, True),
        ((9, 0), False, False),
        ((8, 0), True, False),
        ((10, 0), True, False),
    ]:
        attention.flash_3.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, of=capability: of)
        monkeypatch.setattr(attention, "find_spec", lambda name, has=installed: has or None)
        monkeypatch.setattr(attention, "import_module", modules.__getitem__)
        chosen = attention.flash_3(torch.device("cuda"))
        assert chosen is (flash_attn_varlen_func if taken else None)
        assert attention.flash_3(torch.device("cpu")) is None
    attention.flash_3.cache_clear()


def test_no_cpu_and_no_32_bits_have_the_kernel():
    assert not attention.has_varlen(torch.device("cpu"), torch.bfloat16)
    assert not attention.has_varlen(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("kind", ["opt", "sliding", *["llama"] * ALL])
@torch.no_grad()
def test_flex_attention_sees_what_the_dense_mask_lets_through(kind, monkeypatch):
    # On a CPU it has no backward pass, and is slow to compile.
    monkeypatch.setattr(
        flex_integration,
        "compile_friendly_flex_attention",
        lambda *tensors, training, **options: flex_attention(*tensors, **options),
    )
    model = model_of(kind)
    backbone = Backbone(model)
    for batch in batches():
        inputs = batch.input_ids, batch.position_ids, batch.segment_ids
        states = []
        for kernel in ("flex_attention", "eager"):
            model.config._attn_implementation = kernel
            mask = backbone.inputs(*inputs, getattr(batch, "branch_ids", None))
            states.append(model.base_model(**mask).last_hidden_state)
        torch.testing.assert_close(*states, rtol=1e-5, atol=1e-5)
