"""Inputs of recomputed blocks in host memory: the same bits, and nothing else moved."""

import gc
import weakref

import pytest
import torch

from dschat_lora.config.groups import LoraConfig
from dschat_lora.models.blocks import HostCopies, compile_blocks, offload_inputs, recompute_blocks
from helpers.tiny import random_model, tiny_config, trained

LAYERS = 3
CONFIGS = {kind: tiny_config(kind, num_hidden_layers=LAYERS) for kind in ("opt", "llama", "gpt2")}
CONFIGS["opt"].dropout = 0.1


@pytest.fixture
def kept(monkeypatch):
    """Weak references to the copies that were made, with shapes of what was copied."""
    copied, keep = [], HostCopies.keep

    def noted(copies, tensor):
        copy = keep(copies, tensor)
        copied.append((weakref.ref(copy), tuple(tensor.shape)))
        return copy

    monkeypatch.setattr(HostCopies, "keep", noted)
    return copied


def tiny(family, *, lora=True):
    model = random_model(CONFIGS[family], attn_implementation="sdpa").train()
    if lora:
        trained(model, LoraConfig(lora_dim=2))
    recompute_blocks(model)
    return model


def losses_and_gradients(model, *, batches=2):
    """Of micro-batches of several lengths, with dropout, whose gradients add up."""
    torch.manual_seed(1)
    losses = []
    for length in range(5, 5 + batches):
        ids = torch.randint(32, (2, length))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "all weights"])
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_gradients_are_those_of_plain_recomputation_bit_for_bit(family, lora, kept):
    expected = losses_and_gradients(tiny(family, lora=lora))
    model = tiny(family, lora=lora)
    offload_inputs(model)
    torch.testing.assert_close(losses_and_gradients(model), expected, rtol=0, atol=0)
    # One input a block and micro-batch, of its own length; masks and positions stay.
    assert [shape for _, shape in kept] == [(2, 5, 32)] * LAYERS + [(2, 6, 32)] * LAYERS


@pytest.mark.thorough
def test_compiled_blocks_are_recomputed_from_the_host_as_well(kept):
    def run(graph, inputs):
        return graph

    expected = losses_and_gradients(tiny("opt"), batches=1)
    model = tiny("opt")
    offload_inputs(model)
    compile_blocks(model, backend=run)
    torch.testing.assert_close(losses_and_gradients(model, batches=1), expected, rtol=0, atol=0)
    assert len(kept) == LAYERS


def test_a_backward_pass_leaves_no_copy_behind_and_one_may_be_run_twice(kept):
    model = tiny("llama")
    offload_inputs(model)
    ids = torch.arange(12).reshape(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    assert all(copy() is not None for copy, _ in kept)
    model.zero_grad()
    loss.backward()
    second = [p.grad for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    del loss
    gc.collect()
    assert all(copy() is None for copy, _ in kept)


def test_inputs_are_let_go_as_soon_as_they_are_copied(kept):
    """A block's input is referred to by nothing once the forward pass is over."""
    model = tiny("opt")
    offload_inputs(model)
    inputs = []
    for block in model.model.decoder.layers:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    ids = torch.arange(12).reshape(2, 6)
    loss = model(input_ids=ids, labels=ids).loss
    assert len(inputs) == len(kept) == LAYERS
    assert [x() is None for x in inputs] == [True] * LAYERS
    loss.backward()


def test_nothing_is_copied_where_nothing_is_recomputed(kept):
    model = tiny("llama")
    offload_inputs(model)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids, labels=ids).loss.backward()
    assert kept == []


def test_a_change_of_the_input_after_the_block_does_not_reach_the_copy():
    copies = HostCopies()
    x = torch.ones(3)
    copy = copies.keep(x)
    x.zero_()
    assert copies.take(copy).tolist() == [1, 1, 1]
