"""Compiled blocks: the same numbers at any lengths, names as they were, decoding left alone."""

import shutil

import pytest
import torch
from torch import nn

from dschat_lora.config.groups import LoadConfig, LoraConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.samples import SequenceSample
from dschat_lora.models.blocks import check_compiler, compile_blocks, recompute_blocks
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.models.loading import share_parameters
from dschat_lora.runtime.checks import check_compile
from helpers.tiny import tiny_model, trained


class Counted:
    """Runs graphs as they are; counts them and their runs."""

    def __init__(self):
        self.graphs = self.runs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1

        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


def tiny(layers=1):
    lora = LoraConfig(lora_dim=2, target_modules=("fc1",))
    return trained(tiny_model("opt", layers=layers).train(), lora)


def batch(*rows):
    """Rows of samples of these lengths."""
    ids = [[torch.randint(0, 32, (length,)).numpy() for length in row] for row in rows]
    made = SampleCollator(0)([[SequenceSample.of(each, each) for each in row] for row in ids])
    rows = made.input_ids, made.position_ids, made.segment_ids
    return *rows, made.logit_positions, made.target_ids


def gradient(network, rows):
    network.zero_grad()
    loss = network(*rows)
    loss.backward()
    parts = [p.grad.flatten() for p in network.parameters() if p.grad is not None]
    return torch.cat([loss.detach()[None], *parts])


@pytest.fixture
def counted():
    """A backend that counts; what torch compiled before and after is forgotten."""
    torch._dynamo.reset()
    yield Counted()
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.stage
def test_compiled_blocks_train_alike_and_neither_lengths_nor_layers_are_compiled_again(counted):
    models = [tiny(layers=4), tiny(layers=4)]
    for model in models:
        recompute_blocks(model)
    plain, network = (CausalLMLoss(model).train() for model in models)
    compile_blocks(models[1], backend=counted)
    blocks = [model.model.decoder.layers for model in models]
    # As many tokens as the model is wide, and two layers: the first one's input has no gradient.
    wide = batch([5, 4], [7])
    for model, layers in zip(models, blocks, strict=True):
        model.model.decoder.layers = layers[:2]
    torch.testing.assert_close(gradient(network, wide), gradient(plain, wide))
    graphs, runs = counted.graphs, counted.runs
    for model, layers in zip(models, blocks, strict=True):
        model.model.decoder.layers = layers
    for rows in (wide, batch([6, 3], [13]), batch([17]), batch([9, 3], [12])):
        torch.testing.assert_close(gradient(network, rows), gradient(plain, rows))
    assert counted.graphs == graphs > 0
    # Twice for each batch, in the forward pass and again in the backward pass.
    assert (counted.runs - runs) % 8 == 0
    assert counted.runs > runs


def test_names_stay_and_copies_are_not_compiled(counted):
    model = tiny()
    names = list(model.state_dict())
    compile_blocks(model, backend=counted)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        share_parameters(model)(*batch([5])[:1])
    assert counted.graphs == 0


def test_decoding_with_a_cache_runs_blocks_as_they_are(counted):
    model = tiny().eval()
    ids = batch([5])[0]
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    compile_blocks(model, backend=counted)
    assert torch.equal(model.generate(ids, **options), expected)
    assert counted.graphs == 0


def test_model_without_blocks_is_refused():
    with pytest.raises(
        ValueError, match="--compile compiles transformer blocks, but Linear declares no"
    ):
        compile_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("cpu", r"C\+\+ compiler such as g\+\+"), ("cuda", "C compiler such as gcc")],
)
def test_missing_compiler_is_one_clear_line(monkeypatch, kind, words):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)  # there is no such device

    def compile_nothing(function, **options):
        def fail(x):
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler\nin many\nlines")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    with pytest.raises(ValueError, match=rf"^--compile needs a {words} [^\n]+$") as caught:
        check_compiler(torch.device(kind))
    assert "no working C++ compiler" in str(caught.value)


def test_sharded_weights_are_refused():
    with pytest.raises(ValueError, match="--compile cannot be combined with --zero_stage 3"):
        check_compile(LoadConfig(compile=True), 0, 3)
    check_compile(LoadConfig(compile=True), 2, None)
    check_compile(LoadConfig(), 3)
