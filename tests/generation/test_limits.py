"""Limits of their own for the sequences of a batch, as later turns of an episode have them."""

import pytest
import torch

from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from helpers.tiny import tiny_model

LIMITS = [3, 12, 1, 5, 12]
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], list(range(3, 20)), [21]]


def decoded(model, prompts, limits=None, *, copies=1, most=12):
    decoder = Decoder(model, eos_ids=[2], pad_id=0, device=torch.device("cpu"))
    seeds = [[10 * n + k for k in range(copies)] for n in range(len(prompts))]
    found = decoder(prompts, Sampling(most), seeds=seeds, limits=limits, keep_logprobs=True)
    return found.tokens(), found.logprobs()


@pytest.mark.parametrize("kind", ["opt", "llama", "neox"])
def test_each_sequence_ends_at_its_limit_and_says_what_it_says_without(kind):
    model = tiny_model(kind)
    whole, logprobs = decoded(model, PROMPTS, copies=2)
    limits = [n for n in LIMITS for _ in range(2)]
    found, drawn = decoded(model, PROMPTS, LIMITS, copies=2)
    assert found == [tokens[:n] for tokens, n in zip(whole, limits, strict=True)]
    for mine, expected, n in zip(drawn, logprobs, limits, strict=True):
        assert mine == pytest.approx(expected[:n], abs=1e-6)


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_a_long_sequence_beside_a_short_one_needs_no_positions_that_the_model_lacks(kind):
    model = tiny_model(kind)  # 64 positions
    prompts, limits = [[7] * 60, *[[8, n] for n in range(20)]], [4, *[40] * 20]
    found, _ = decoded(model, prompts, limits, most=40)
    alone, _ = decoded(model, prompts[:1], most=4)
    assert found[0] == alone[0]
    with pytest.raises(AssertionError, match="60 tokens and 5 new ones exceed the model's 64"):
        decoded(model, prompts, [5, *[40] * 20], most=40)
