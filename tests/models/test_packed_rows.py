"""Samples of a packed row are computed as if each stood alone; where not, it is noticed.

So are branches of a tree, see test_pair_rows.py.
"""

import pytest
import torch

from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.models.architecture_checks import check_architecture, head_is_linear
from dschat_lora.models.backbone import Backbone, attention_windows
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.supervised import batching as layout
from helpers import plain
from helpers.spread import ALL
from helpers.tiny import (
    KINDS,
    VOCAB,
    changing_inputs,
    ragged_samples,
    softcapped_model,
    tiny_model,
    trained,
)

pytestmark = pytest.mark.usefixtures("both_ways")

CPU = torch.device("cpu")
# Kinds whose layers, or some of them, see windows that samples are longer than.
SLIDING = {kind: {"sliding_window": 4} for kind in ("mistral", "gemma3", "qwen3")}
SLIDING["qwen3"] |= {
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
}


def tensors(batch):
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "segment_ids": batch.segment_ids,
    }


def predictions(batch):
    return {"logit_positions": batch.logit_positions, "target_ids": batch.target_ids}


def adapted(kind, attention="sdpa", **changes):
    return trained(tiny_model(kind, attention, **changes), LoraConfig(lora_dim=3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*KINDS, *SLIDING])
def test_packed_samples_equal_each_sample_alone(kind, attention):
    # In fp32, of some machines, rounding alone moves a gradient by as much as is allowed here.
    model = adapted(kind, attention, **SLIDING.get(kind, {})).double()
    samples = ragged_samples(7, longest=9, seed=3)
    # Rows of three, three and one sample, padded to a common width.
    batch = SampleCollator(0)([samples[:3], samples[3:6], samples[6:]])
    network = CausalLMLoss(model)
    states, real = network.backbone(**tensors(batch)), batch.segment_ids > 0
    assert network.backbone.skips_padding(CPU) <= (not states[~real].any())
    hidden = states[real]
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


def test_a_batch_without_targets_has_zero_loss_and_zero_gradient_everywhere():
    model = adapted("opt")
    batch = SampleCollator(0)([ragged_samples(1)])
    none = torch.zeros(0, dtype=torch.int64)
    loss = CausalLMLoss(model)(**tensors(batch), logit_positions=none, target_ids=none)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad.abs().max() == 0 for p in adapter_parameters(model).values())


@pytest.mark.parametrize("kind", [*KINDS, "mistral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"] if ALL else ["sdpa"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16][:: 1 if ALL else 2]
)
def test_probe_finds_nothing_wrong_with_these_architectures(kind, attention, dtype):
    model = tiny_model(kind, attention, **SLIDING.get(kind, {})).to(dtype)
    report = looked_at(model)
    assert report.branch_leak_error == 0.0
    assert report.packing_is_exact
    assert report.tree_is_exact
    assert head_is_linear(model, vocab_size=VOCAB, device=CPU)


def is_tree(inputs):
    """A row without padding whose positions go back, but never to 0."""
    positions = inputs.get("position_ids")
    if positions is None:
        return False
    return bool((positions[0].diff() < 0).any() and (positions == 0).sum() == 1)


def under(segments, inputs, model):
    mask = block_causal_mask(segments, model.dtype)
    return inputs | {"attention_mask": mask, "spans": None}


def mixing(inputs, model):
    """A position sees every earlier one of its row."""
    return under(torch.ones_like(inputs["input_ids"]), inputs, model)


def hiding_the_beginning(inputs, model):
    """Each branch is a sequence of its own."""
    segments = torch.ones_like(inputs["input_ids"])
    segments[:, (inputs["position_ids"][0].diff() < 0).nonzero()[0].item() + 1 :] = 2
    return under(segments, inputs, model)


def counting_on(inputs, model):
    """Positions go on from those of what is before."""
    return inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]}


def broken(kind, how, *, in_trees=False):
    """A model that computes rows otherwise, trees alone or any of several samples."""
    model = tiny_model(kind)

    def change(inputs):
        whole = inputs.get("attention_mask") is None or (in_trees and not is_tree(inputs))
        return inputs if whole else how(inputs, model)

    return changing_inputs(model, change)


def looked_at(model):
    return check_architecture(Backbone(model), vocab_size=VOCAB, device=CPU)


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, mixing) for kind in KINDS]
    # Rotary embeddings know differences of positions alone, and the mask hides the rest.
    + [(kind, counting_on) for kind in ("opt", "gpt2")],
)
def test_probe_notices_samples_that_influence_each_other(kind, how):
    model = broken(kind, how)
    report = looked_at(model)
    assert not report.packing_is_exact
    assert not report.tree_is_exact
    assert head_is_linear(model, vocab_size=VOCAB, device=CPU)


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama", "qwen2"][:: 1 if ALL else 3])
@pytest.mark.parametrize("how", [mixing, hiding_the_beginning, counting_on])
def test_a_tree_that_is_broken_is_noticed_where_packing_is_sound(kind, how):
    report = looked_at(broken(kind, how, in_trees=True))
    assert report.packing_is_exact
    assert not report.tree_is_exact
    assert (report.branch_leak_error > 1e-5) == (how is mixing)


def test_probe_notices_logits_that_are_more_than_a_linear_layer():
    assert not head_is_linear(softcapped_model(), vocab_size=VOCAB, device=CPU)


def test_layers_whose_mask_is_none_of_ours_are_told():
    config = tiny_model("mistral").config
    config.layer_types = ["chunked_attention", "full_attention"]
    assert attention_windows(config) is None


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
    packing, said = settle(CausalLMLoss(broken("opt", mixing)))
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


@pytest.mark.parametrize("in_trees", [False, True])
def test_probe_notices_a_leak_that_16_bit_rounding_would_hide(in_trees):
    model = tiny_model("llama").to(torch.bfloat16)

    def leak(module, inputs, named, run):
        states = run.last_hidden_state
        first, second = (7, 12) if in_trees else (0, 0)  # tokens before the branches of the probe
        if is_tree(named) or not in_trees:
            moved = states[:, second:] + 0.02 * states[:, first : first + 1]
            run.last_hidden_state = torch.cat([states[:, :second], moved], dim=1)

    assert looked_at(model).tree_is_exact
    model.model.register_forward_hook(leak, with_kwargs=True)
    report = looked_at(model)
    assert (report.packing_is_exact, report.tree_is_exact) == (in_trees, not in_trees)
    leaks = (report.leak_error, report.branch_leak_error)[in_trees]
    assert leaks > 0.001
    assert (report.packing_error, report.tree_error)[in_trees] < 0.1
