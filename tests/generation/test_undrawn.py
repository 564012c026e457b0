"""Logits that are not finite: the answers that they belong to end, and no other changes."""

import math

import pytest
import torch

from dschat_lora.config.verbs import GenerateConfig
from dschat_lora.engine.zero import broken_parameters
from dschat_lora.generation.generate import Decoder, decode
from dschat_lora.generation.sampling import (
    NO_TOKEN,
    Sampling,
    sample_each,
    sample_tokens,
    undrawn_reason,
)
from dschat_lora.rl.options.config import RolloutConfig
from helpers.tiny import tiny_model

NAN, INF = torch.nan, torch.inf
KINDS = {
    "greedy": Sampling(4, do_sample=False),
    "sampled": Sampling(4),
    "warm": Sampling(4, temperature=1.7),
    "top-k": Sampling(4, top_k=2),
    "top-p": Sampling(4, top_p=0.6),
    "both": Sampling(4, temperature=0.5, top_k=3, top_p=0.9),
}
PROMPTS = [[5, 6, 7], [10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("name", KINDS)
def test_a_row_without_a_largest_finite_logit_has_no_token(name):
    row = [0.5, 1.0, -2.0, 0.0]
    broken = [[NAN, 1.0, 0.0, 0.0], [0.0, INF, 0.0, 0.0], [INF, INF, 0.0, 0.0], [-INF] * 4]
    broken += [[NAN] * 4, [0.0, 1.0, -INF, NAN]]
    logits = torch.tensor([row, *broken, row])
    uniform = torch.full((len(logits),), 0.4, dtype=torch.float64)
    alone = sample_tokens(torch.tensor([row]), uniform[:1], KINDS[name])[0]
    expected = [int(alone), *[NO_TOKEN] * len(broken), int(alone)]
    assert sample_tokens(logits, uniform, KINDS[name]).tolist() == expected
    assert sample_each(logits, [KINDS[name]] * len(logits), uniform.tolist()) == expected


@pytest.mark.parametrize("name", KINDS)
def test_minus_infinity_alone_leaves_a_token_out(name):
    logits = torch.tensor([[-INF, 0.0, -INF], [-INF, -INF, 3e38]])
    for value in (1e-17, 0.5, 1.0):
        uniform = torch.full((2,), value, dtype=torch.float64)
        if KINDS[name].temperature < 1:
            logits = logits.clamp(max=1e38)
        assert sample_tokens(logits, uniform, KINDS[name]).tolist() == [1, 2]


def test_the_lowest_temperature_takes_the_likeliest_token_of_logits_of_any_model():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 1e4
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = sample_tokens(logits, 1 - uniform, Sampling(1, temperature=1e-6))
    assert chosen.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [1e-300, 1e-7, -1.0, NAN])
def test_every_option_refuses_a_temperature_that_overflows(value):
    for make in (
        lambda t: Sampling(1, temperature=t),
        lambda t: Sampling(1, policy_temperature=t),
        lambda t: RolloutConfig(temperature=t),
        lambda t: GenerateConfig(model_name_or_path="m", prompts=("a",), temperature=t),
    ):
        with pytest.raises(ValueError, match="temperature must be (at least|>=) 1e-06"):
            make(value)
        make(1e-6)


class Spoilt(torch.nn.Module):
    """A head whose logits of some calls and rows are NaN."""

    def __init__(self, head, spoil):
        super().__init__()
        self.head, self.spoil, self.calls = head, spoil, 0
        self.weight = head.weight

    def forward(self, hidden):
        logits = self.head(hidden)
        for call, row in self.spoil:
            if call == self.calls:
                logits[row] = NAN
        self.calls += 1
        return logits


@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize("sampling", [KINDS["greedy"], KINDS["sampled"], KINDS["both"]], ids=str)
def test_a_sequence_whose_token_cannot_be_drawn_ends_and_the_others_do_not(kind, sampling):
    model = tiny_model(kind)
    options = {"eos_ids": (), "pad_id": 0, "device": torch.device("cpu")}
    seeds = [[1], [2], [3]]
    whole = Decoder(model, **options)(PROMPTS, sampling, seeds=seeds, keep_logprobs=True)
    expected, logprobs = whole.tokens(), whole.logprobs()
    assert whole.undrawn() == [False] * 3
    model.set_output_embeddings(Spoilt(model.get_output_embeddings(), [(0, 2), (1, 0)]))
    responses = Decoder(model, **options)(PROMPTS, sampling, seeds=seeds, keep_logprobs=True)
    assert responses.undrawn() == [True, False, True]
    assert responses.tokens()[0][:-1] == expected[0][:1]
    assert responses.tokens()[1] == expected[1]
    assert [len(tokens) for tokens in responses.tokens()] == [2, 4, 1]
    torch.testing.assert_close(responses.logprobs()[1], logprobs[1], rtol=0, atol=1e-5)
    assert math.isnan(responses.logprobs()[0][1])
    assert math.isnan(responses.logprobs()[2][0])


def test_a_caller_that_cannot_leave_answers_out_is_told():
    model = tiny_model("llama")
    model.set_output_embeddings(Spoilt(model.get_output_embeddings(), [(1, 1)]))
    with pytest.raises(
        ValueError, match="^no token can be sampled: the model's logits are not fini"
    ):
        decode(
            model,
            PROMPTS,
            KINDS["greedy"],
            seeds=[[0]] * 3,
            eos_ids=(),
            pad_id=0,
            device=torch.device("cpu"),
        )


def test_weights_that_are_not_finite_are_named():
    weights = {name: torch.zeros(2, 2) for name in ("a", "b", "c", "d")}
    weights["b"][1, 0], weights["d"][0, 1] = NAN, -INF
    weights["packed"] = torch.zeros(3, dtype=torch.uint8)
    assert broken_parameters(weights) == ["b", "d"]
    assert undrawn_reason(["b", "d"]).endswith("as its weight b and 1 more holds NaN or infinity")
    assert undrawn_reason(["b"]).endswith("as its weight b holds NaN or infinity")
