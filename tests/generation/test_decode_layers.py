"""Steps by few operators against the layers as they are."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import ModelConfig
from dschat_lora.generation.decode_layers import decoding_forwards
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from dschat_lora.kernels import support
from dschat_lora.models.fused import keep_plain
from dschat_lora.models.loading import load_causal_lm, load_config, share_parameters
from generation.test_slots import GREEDY, MIXED, PROMPTS, WANTS, continuous
from helpers.decoding import CPU, check_alike, decoder_of, generated
from helpers.kinds import tiny_config
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import adapted, tiny_model

KINDS = ["opt", "llama", "qwen2", "qwen3"]  # biases, grouped queries, biases of some, normed heads
DRAWN = Sampling(4)
SEEDS = [[number, 50 + number] for number in range(2)]


class Operators(TorchDispatchMode):
    """Counts operators of the package."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        space, _, name = operation.name().partition("::")
        if space == "dschat_lora":
            self.counts[name] = self.counts.get(name, 0) + 1
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def operators(monkeypatch):
    """Has steps computed as on a GPU, by the plain sums of operators, or by their kernels."""

    def switch(*, kernels=False):
        monkeypatch.setattr(support, "ON_CPU" if kernels else "PLAIN_ON_CPU", True)

    return switch


def drawn(model, sampling=DRAWN, *, rows=0, **options):
    decoding_forwards(model, {})  # which tries them once
    decoder = decoder_of(model, [2], largest=(rows, 0), **options)
    with Operators() as seen:
        responses = decoder(PROMPTS[:2], sampling, seeds=SEEDS, keep_logprobs=True)
    return responses, seen.counts


def lively(kind):
    """A tiny model whose adapters say something."""
    return adapted(tiny_model(kind), 0)


@pytest.mark.parametrize("kernels", [False, *[True] * ALL])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_logprobs_are_those_of_the_layers(kind, merged, kernels, operators):
    model = lively(kind)
    expected = drawn(model, merged=merged)
    assert not any(name in expected[1] for name in ("place_heads", "add_low_rank"))
    operators(kernels=kernels)
    said = drawn(model, merged=merged)
    check_alike(expected[0], said[0], 1e-5)
    assert said[1]["place_heads"] == 3 * 2, "one a step and layer"


@pytest.mark.parametrize("kind", KINDS if ALL else ["llama", "opt"])
def test_refilled_rows_and_recorded_steps_say_the_same(kind, operators, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.ROW_BUCKETS", (2, 6, 8))
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", 8)
    model, tapes, sampling = lively(kind), [], Sampling(6, temperature=0.8)
    expected = drawn(model, sampling)
    operators()
    record = lambda step: tapes.append(Tape(step)) or tapes[-1]  # noqa: E731
    check_alike(expected[0], drawn(model, sampling, record=record)[0], 1e-5)
    assert tapes
    refilled = drawn(model, sampling, rows=3)
    check_alike(expected[0], refilled[0], 1e-5)
    assert refilled[1]["place_heads"] > 5 * 2


@pytest.mark.parametrize(
    ("draws", "options"),
    [
        (3 + 1, {}),
        (3 + 1, {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "policy_temperature": 1.0}),
        (0, {"do_sample": False}),
    ],
)
def test_tokens_are_drawn_and_their_logprobs_kept_by_the_same_options(draws, options, operators):
    model, sampling = tiny_model("llama"), Sampling(4, **options)
    expected = drawn(model, sampling)
    operators()
    kernels = drawn(model, sampling)
    check_alike(expected[0], kernels[0], 1e-5)
    assert kernels[1].get("draw_token", 0) == draws


@pytest.mark.parametrize("unpacked", [True, False])
@pytest.mark.parametrize("kind", KINDS if ALL else ["opt", "llama"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bases_in_four_bits_say_the_same(kind, unpacked, operators, model_directory):
    path, config = model_directory(kind), ModelConfig(base_bits=4)
    options = {"dtype": torch.float32, "meta": False}
    model = adapted(load_causal_lm(path, load_config(path, config), config, **options), 0)
    expected = drawn(model, unpacked=unpacked)
    operators()
    kernels = drawn(model, unpacked=unpacked)
    check_alike(expected[0], kernels[0], 1e-5)
    assert ("low_rank_residual" in kernels[1]) == unpacked
    assert kernels[1]["place_heads"] == 3 * 2


@pytest.mark.skipif(not MIXED, reason="the add-on is not there")
@pytest.mark.parametrize("kind", KINDS if ALL else ["qwen3"])
def test_each_row_uses_its_own_adapter(kind, operators):
    base = tiny_model(kind)
    models = [adapted(base, seed) for seed in range(2)]
    model, chosen = share_parameters(base), MIXED[0].AdapterRows(CPU)
    MIXED[0].mix_adapters(model, models, rows=chosen)
    operators()
    numbers = [1, 0, 2, 1, 2, 0]
    with Operators() as seen:
        said = continuous(SlotRows(model.eval(), chosen, pad_id=0), [GREEDY] * 6, numbers)
    for prompt, number, count, tokens in zip(PROMPTS, numbers, WANTS, said, strict=True):
        assert tokens == generated([base, *models][number], prompt, count)
    assert seen.counts["place_heads"] > 20


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        *(("mistral", 2), ("qwen3_moe", 2), ("gemma2", 0), ("phi", 0), ("olmo2", 0)),
        *([("mixtral", 2), ("smollm3", 1)] * ALL),  # whose every fourth layer does not rotate
    ],
)
def test_layers_of_other_forms_are_left_as_they_are(kind, layers, operators):
    operators()
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    assert len(decoding_forwards(model, {})) == layers


def test_a_residual_that_the_architecture_multiplies_is_no_layer_of_llama_s_form(operators):
    operators()
    config = tiny_config("granite")
    assert len(decoding_forwards(AutoModelForCausalLM.from_config(config).eval(), {})) == 2
    config.residual_multiplier = 0.5
    assert decoding_forwards(AutoModelForCausalLM.from_config(config).eval(), {}) == {}


def test_layers_with_hooks_within_and_models_that_are_to_stay_plain_are_left(operators):
    model, seen = lively("llama"), []
    expected = drawn(model)
    operators()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    kernels = drawn(model)
    check_alike(expected[0], kernels[0], 1e-5)
    assert (len(seen), kernels[1]["place_heads"]) == (4, 3)
    hook.remove()
    keep_plain(model)
    assert "place_heads" not in drawn(share_parameters(model))[1]
