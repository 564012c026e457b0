"""Samples of a packed row are computed as if each stood alone; where not, it is noticed."""

import pytest
import torch
from torch import nn

from dschat_lora.algos.logprobs import GroupSums
from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.models.architecture_checks import check_architecture, head_is_linear
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.causal_lm import CausalLMLoss, LinearHead
from dschat_lora.supervised import batching as layout
from helpers import plain
from helpers.spread import ALL
from helpers.tiny import KINDS, VOCAB, changing_inputs, ragged_samples, softcapped_model, tiny_model

pytestmark = pytest.mark.usefixtures("both_ways")

CPU = torch.device("cpu")


def tensors(batch):
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "segment_ids": batch.segment_ids,
    }


def predictions(batch):
    return {"logit_positions": batch.logit_positions, "target_ids": batch.target_ids}


def adapted(kind, attention="sdpa"):
    model = tiny_model(kind, attention)
    apply_lora(model, LoraConfig(lora_dim=3), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_equal_each_sample_alone(kind, attention):
    # In fp32, of some machines, rounding alone moves a gradient by as much as is allowed here.
    model = adapted(kind, attention).double()
    samples = ragged_samples(7, longest=9, seed=3)
    # Rows of three, three and one sample, padded to a common width.
    batch = SampleCollator(0)([samples[:3], samples[3:6], samples[6:]])
    network = CausalLMLoss(model)
    hidden = network.backbone(**tensors(batch))[batch.segment_ids > 0]
    with torch.no_grad():
        ids = [torch.as_tensor(s.input_ids, dtype=torch.long)[None] for s in samples]
        alone = torch.cat([model.base_model(input_ids=each)[0][0] for each in ids])
    torch.testing.assert_close(hidden.detach(), alone, rtol=1e-5, atol=1e-5)

    parameters = adapter_parameters(model)
    loss = network(**tensors(batch), **predictions(batch))
    packed = torch.autograd.grad(loss, list(parameters.values()))
    slow = sum(plain.sample_loss(model, sample)[0] for sample in samples)
    expected = torch.autograd.grad(slow, list(parameters.values()))
    torch.testing.assert_close(loss.double(), slow, rtol=1e-6, atol=0)
    for value, wanted in zip(packed, expected, strict=True):
        error = (value - wanted).norm() / wanted.norm()
        assert error < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_neighbours_have_no_influence(kind):
    network = CausalLMLoss(tiny_model(kind))
    samples = ragged_samples(4, longest=8, seed=4)
    loss = network(**tensors(b := SampleCollator(0)([samples[:2]])), **predictions(b))
    wide = SampleCollator(7, multiple_of=32)([samples[:2]])
    torch.testing.assert_close(network(**tensors(wide), **predictions(wide)), loss)
    more = SampleCollator(0)([samples[:2], samples[2:]])
    rest = network(**tensors(b := SampleCollator(0)([samples[2:]])), **predictions(b))
    torch.testing.assert_close(network(**tensors(more), **predictions(more)), loss + rest)


def test_a_batch_without_targets_has_zero_loss_and_zero_gradient_everywhere():
    model = adapted("opt")
    batch = SampleCollator(0)([ragged_samples(1)])
    none = torch.zeros(0, dtype=torch.int64)
    loss = CausalLMLoss(model)(**tensors(batch), logit_positions=none, target_ids=none)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad.abs().max() == 0 for p in adapter_parameters(model).values())


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_full_logits_and_checkpointed_heads_give_the_same_loss_and_gradient(kind):
    batch = SampleCollator(0)([ragged_samples(4, longest=8)])
    parity = torch.arange(batch.num_targets) % 2

    def loss_and_gradient(change):
        model = adapted(kind).double()
        network = CausalLMLoss(model)
        change(network, model)
        groups = GroupSums(parity, torch.zeros(2, dtype=torch.float64))
        loss = network(**tensors(batch), **predictions(batch), groups=groups)
        loss.backward()
        sums = torch.stack([loss, *groups.sums])
        return sums, [p.grad for p in adapter_parameters(model).values()]

    def checkpointed(network, model):
        network.head = LinearHead(nn.Sequential(model.get_output_embeddings()), VOCAB)
        network.head.rows = 3
        assert not network.head.plain

    chunked = loss_and_gradient(lambda network, model: None)
    for change in (lambda network, model: setattr(network, "full_logits", True), checkpointed):
        loss, gradients = loss_and_gradient(change)
        torch.testing.assert_close(loss, chunked[0])
        for value, expected in zip(gradients, chunked[1], strict=True):
            assert (value - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"] if ALL else ["sdpa"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16][:: 1 if ALL else 2]
)
def test_probe_finds_nothing_wrong_with_these_architectures(kind, attention, dtype):
    model = tiny_model(kind, attention).to(dtype)
    report = check_architecture(Backbone(model), vocab_size=VOCAB, device=CPU)
    assert report.packing_is_exact
    assert report.tree_is_exact
    assert head_is_linear(model, vocab_size=VOCAB, device=CPU)


def mixing_samples(model):
    """The same model, but a position sees every earlier one of its row."""

    def change(inputs):
        if inputs.get("attention_mask") is None:
            return inputs
        one_sample = torch.ones_like(inputs["input_ids"])
        mask = block_causal_mask(one_sample, model.dtype)
        return inputs | {"attention_mask": mask, "spans": None}

    return changing_inputs(model, change)


def counting_positions_through(model):
    """The same model, but a sample's positions go on from the one before it."""

    def change(inputs):
        positions = torch.arange(inputs["input_ids"].shape[1])[None]
        return inputs | {"position_ids": positions}

    return changing_inputs(model, change)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [(kind, mixing_samples) for kind in KINDS]
    # Rotary embeddings know differences of positions alone, and the mask hides the rest.
    + [(kind, counting_positions_through) for kind in ("opt", "gpt2")],
)
def test_probe_notices_samples_that_influence_each_other(kind, broken):
    model = broken(tiny_model(kind))
    report = check_architecture(Backbone(model), vocab_size=VOCAB, device=CPU)
    assert not report.packing_is_exact
    assert not report.tree_is_exact
    assert head_is_linear(model, vocab_size=VOCAB, device=CPU)


def test_probe_notices_logits_that_are_more_than_a_linear_layer():
    assert not head_is_linear(softcapped_model(), vocab_size=VOCAB, device=CPU)


class Said:
    """Log and record of a run, kept."""

    def __init__(self):
        self.lines, self.fields = [], {}
        self.log = self.record = self

    def say(self, line):
        self.lines.append(line)

    def update(self, fields):
        self.fields |= fields


class Engine:
    """What settling asks of an engine."""

    device = CPU

    def __init__(self, module):
        self.module = module

    def eval(self):
        self.module.eval()


def settle(network, packing=True):
    said = Said()
    layout.resolve_head(Engine(network), VOCAB, said)
    return layout.resolve_packing(Engine(network), packing, VOCAB, said), said


def test_packing_is_kept_where_it_is_exact_and_left_where_not_asked_for():
    network = CausalLMLoss(tiny_model("llama"))
    assert settle(network)[0] is True
    assert settle(network, packing=False)[0] is False
    assert settle(network)[1].lines == []
    assert not network.full_logits


def test_packing_is_given_up_aloud_where_samples_would_mix():
    packing, said = settle(CausalLMLoss(mixing_samples(tiny_model("opt"))))
    assert packing is False
    assert any("packing is off" in line for line in said.lines)


def test_whole_logits_are_used_aloud_where_the_model_transforms_them():
    model = softcapped_model()
    network = CausalLMLoss(model)
    _, said = settle(network)
    assert network.full_logits
    assert any("transforms its logits" in line for line in said.lines)
    sample = ragged_samples(1)[0]
    batch = SampleCollator(0)([[sample]])
    loss = network(**tensors(batch), **predictions(batch))
    torch.testing.assert_close(loss, plain.sample_loss(model, sample)[0], rtol=1e-5, atol=1e-5)


def test_architecture_that_takes_no_mask_of_ours_is_trained_unpacked_under_its_own():
    model = tiny_model("bloom", None, use_cache=False)
    network = CausalLMLoss(model)
    packing, said = settle(network)
    assert packing is False
    assert any("packing is off" in line for line in said.lines)
    ids = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 10, 11, 12, 13, 14]])
    segments = (ids > 0).long()
    labels = ids.masked_fill(ids == 0, -100)
    positions = torch.arange(6).expand(2, 6)
    # transformers' own mean over the 3 + 5 predictions
    reference = model(input_ids=ids, attention_mask=segments, labels=labels).loss * 8
    (places,) = (segments[:, 1:] > 0).flatten().nonzero(as_tuple=True)
    places += places // 5  # of rows of six positions
    loss = network(ids, positions, segments, places, ids.flatten()[places + 1])
    torch.testing.assert_close(loss, reference)


def test_probe_notices_a_leak_that_16_bit_rounding_would_hide():
    model = tiny_model("llama").to(torch.bfloat16)

    def leak(module, inputs, run):
        states = run.last_hidden_state
        run.last_hidden_state = states + 0.02 * states[:, :1]

    exact = check_architecture(Backbone(model), vocab_size=VOCAB, device=CPU)
    assert exact.packing_is_exact
    model.model.register_forward_hook(leak)
    report = check_architecture(Backbone(model), vocab_size=VOCAB, device=CPU)
    assert report.leak_error > 0.001
    assert report.packing_error < 0.1
    assert not report.packing_is_exact
