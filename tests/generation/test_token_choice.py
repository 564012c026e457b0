"""Tokens drawn from logits, against the definitions and exact distributions."""

import pytest
import torch

from dschat_lora.generation.sampling import Sampling, keep_top, sample_tokens, uniforms


def test_seeds_differ_in_all_their_bits():
    rows = uniforms([7, 7 + 2**32, 7 + 2**62, 7], 4)
    assert torch.equal(rows[0], rows[3])
    assert len(set(rows[:3].flatten().tolist())) == 12


def test_random_numbers_are_above_0_and_may_be_1(monkeypatch):
    class Least:
        def __init__(self, seed):
            self.random = lambda: 0.0

    monkeypatch.setattr("dschat_lora.generation.sampling.Random", Least)
    assert uniforms([1], 2).tolist() == [[1.0, 1.0]]


def plain_distribution(logits, sampling):
    """Probabilities of one row of logits by the definitions, token by token."""
    scaled = [value / sampling.temperature for value in logits.double().tolist()]
    kept = set(range(len(scaled)))
    if sampling.top_k:
        worst = sorted(scaled, reverse=True)[: sampling.top_k][-1]
        kept = {i for i in kept if scaled[i] >= worst}
    weights = torch.tensor([scaled[i] if i in kept else -torch.inf for i in range(len(scaled))])
    probabilities = weights.double().softmax(0).tolist()
    total, nucleus = 0.0, set()
    for index in sorted(kept, key=lambda i: -probabilities[i]):
        if total >= sampling.top_p:
            break
        nucleus.add(index)
        total += probabilities[index]
    rest = sum(probabilities[i] for i in nucleus)
    return [p / rest if i in nucleus else 0.0 for i, p in enumerate(probabilities)]


FILTERS = [
    Sampling(1),
    Sampling(1, temperature=0.5),
    Sampling(1, top_p=0.6),
    Sampling(1, top_k=5),
    Sampling(1, temperature=2.0, top_k=9, top_p=0.7),
    Sampling(1, top_k=1),
    Sampling(1, top_p=1e-6),
    Sampling(1, top_k=100),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_filters_keep_what_their_definitions_keep(sampling):
    logits = 2 * torch.randn(6, 31, generator=torch.Generator().manual_seed(3))
    kept = keep_top(logits / sampling.temperature, sampling).softmax(-1)
    expected = torch.tensor([plain_distribution(row, sampling) for row in logits])
    torch.testing.assert_close(kept, expected)


def test_tokens_tied_with_the_last_one_kept_stay():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0]])
    top = {
        "top_k": keep_top(logits, Sampling(1, top_k=2)),
        "top_p": keep_top(logits, Sampling(1, top_p=0.6)),
    }
    for kept in top.values():
        assert kept.isfinite().tolist() == [[False, True, True, True, False]]


def test_a_bound_that_rounding_never_reaches_keeps_all():
    logits = torch.randn(200, 31, generator=torch.Generator().manual_seed(3))
    kept = keep_top(logits, Sampling(1, top_p=1 - 1e-12))
    # a probability too small to move the sum may be left out
    assert kept.isfinite().sum(-1).min() > 25


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_drawn_tokens_follow_the_exact_distribution(sampling):
    logits = 1.5 * torch.randn(1, 12, generator=torch.Generator().manual_seed(5))
    count = 20_000
    uniform = uniforms(range(count), 1)[:, 0]
    drawn = sample_tokens(logits.expand(count, -1), uniform, sampling)
    counts = torch.bincount(drawn, minlength=12)
    expected = count * torch.tensor(plain_distribution(logits[0], sampling))
    assert not counts[expected == 0].any()
    possible = expected > 0
    misfit = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    # chi-square of at most 11 degrees of freedom: above 31.3 once in a thousand times
    assert misfit < 31.3


def test_a_token_is_the_first_whose_cumulated_probability_reaches_the_random_number():
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().repeat(6, 1)
    uniform = torch.tensor([1e-17, 0.25, 0.2500001, 0.75, 0.76, 1.0], dtype=torch.float64)
    assert sample_tokens(logits, uniform, Sampling(1)).tolist() == [0, 0, 2, 2, 3, 3]


def test_a_token_of_no_probability_is_not_drawn_at_either_end():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    for value in (2.0**-53, 1.0):
        assert sample_tokens(logits, torch.tensor([value]).double(), Sampling(1)).tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
        ({"temperature": 0.0}, "temperature must be at least 1e-06, found 0.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], found 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], found 1.1"),
        ({"top_k": -1}, r"top_k must be 0 \(all\) or more, found -1"),
    ],
)
def test_options_that_mean_no_distribution_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 1, **options})
