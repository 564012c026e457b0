"""Importance weights: by hand, as TRL computes them, and the gradient that they mend."""

import inspect
import itertools
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch

from dschat_lora.algos.importance import importance_weights, sampler_mismatch
from dschat_lora.algos.ppo import policy_loss

MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
# Ratios 1/2, 1, 8 and 3/2, 1/4: products 4 and 3/8. Padding holds anything.
POLICY = torch.tensor([[0.25, 0.5, 0.8], [0.6, 0.1, math.nan], [0.9, 0.0, 0.5]]).log()
SAMPLER = torch.tensor([[0.5, 0.5, 0.1], [0.4, 0.4, 0.7], [0.0, math.nan, 0.5]]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cap": 2}, [[0.5, 1, 2], [1.5, 0.25, 0], [0, 0, 0]]),
        ({"cap": 2, "floor": 0.75}, [[0.75, 1, 2], [1.5, 0.75, 0], [0, 0, 0]]),
        ({"cap": 2, "masks": True}, [[0.5, 1, 0], [1.5, 0.25, 0], [0, 0, 0]]),
        ({"cap": 2, "floor": 0.3, "masks": True}, [[0.5, 1, 0], [1.5, 0, 0], [0, 0, 0]]),
        ({"cap": 8, "level": "sequence"}, [[4, 4, 4], [0.375, 0.375, 0], [0, 0, 0]]),
        ({"cap": 3, "level": "sequence"}, [[3, 3, 3], [0.375, 0.375, 0], [0, 0, 0]]),
        ({"cap": 3, "level": "sequence", "masks": True}, [[0, 0, 0], [0.375, 0.375, 0], [0, 0, 0]]),
        (
            {"cap": 9, "floor": 0.5, "level": "sequence", "masks": True},
            [[4, 4, 4], [0, 0, 0], [0, 0, 0]],
        ),
    ],
)
def test_weights_are_ratios_within_bounds_and_0_in_the_padding(options, expected):
    weights = importance_weights(POLICY.requires_grad_(), SAMPLER, MASK, **options)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))
    assert not weights.requires_grad


def test_the_mismatch_is_k3_and_the_largest_ratio():
    ratios = [0.5, 1, 8, 1.5, 0.25]
    k3 = sum(r - 1 - math.log(r) for r in ratios) / 5
    token = sampler_mismatch(POLICY, SAMPLER, MASK)
    assert token == pytest.approx((k3, 8), rel=1e-5)
    assert sampler_mismatch(POLICY, SAMPLER, MASK, level="sequence") == pytest.approx(
        (k3, 4), rel=1e-5
    )
    nothing = sampler_mismatch(POLICY, SAMPLER, torch.zeros_like(MASK))
    assert all(map(math.isnan, nothing))


def trl_weights(mode, policy, sampler, mask, *, high, low):
    """What the lines of TRL's ``GRPOTrainer`` make of the two log-probabilities."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    source = inspect.getsource(trainer.GRPOTrainer._generate_and_score_completions)
    first = source.index("per_token_logps_diff = (old_per_token_logps")
    lines = source[first : source.index("# Compute the per-token log probabilities for the ref")]
    code = textwrap.dedent(" " * (first - source.rindex("\n", 0, first) - 1) + lines)
    names = {
        "torch": torch,
        "math": math,
        "mask": mask.int(),
        "old_per_token_logps": policy,
        "sampling_per_token_logps": sampler,
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=high,
            vllm_importance_sampling_clip_min=low,
        ),
    }
    exec(code, names)
    return names["vllm_importance_sampling_ratio"] * mask


@pytest.mark.parametrize("low", [0.7, None])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("masks", "word"), [(False, "truncate"), (True, "mask")])
def test_weights_are_those_of_trl(level, masks, word, low):
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(16, 12, generator=generator)
    sampler = policy + 0.4 * torch.randn(16, 12, generator=generator)
    mask = torch.arange(12) < torch.randint(1, 13, (16, 1), generator=generator)
    bounds = {"cap": 1.5, "floor": low or 0.0}
    weights = importance_weights(policy, sampler, mask, level=level, masks=masks, **bounds)
    expected = trl_weights(f"{level}_{word}", policy, sampler, mask, high=1.5, low=low)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-6)
    counted = weights[mask]
    assert (counted != 1.5).any()
    assert ((counted == 0) if masks else (counted == 1.5)).any()


VOCABULARY, LENGTH = 3, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))


def logprobs_of(logits):
    """(27, 3) log-probabilities of all sequences under (3, 4, 3) logits by step and last token."""
    last = torch.cat([torch.full((len(SEQUENCES), 1), VOCABULARY), SEQUENCES[:, :-1]], dim=1)
    steps = torch.arange(LENGTH).expand_as(SEQUENCES)
    return logits.log_softmax(-1)[steps, last, SEQUENCES]


def gradients(scale, **correction):
    """(true, estimated) gradients of the mean reward, each an exact sum over all sequences.

    Sequences are drawn with logits that are off by ``scale`` times a normal number.
    """
    generator = torch.Generator().manual_seed(3)
    shape = (LENGTH, VOCABULARY + 1, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    reward = torch.randn(len(SEQUENCES), 1, generator=generator, dtype=torch.float64)
    own = logprobs_of(logits)
    (true,) = torch.autograd.grad((own.sum(1).exp() * reward[:, 0]).sum(), logits)
    own = logprobs_of(logits)
    drawn = logprobs_of(logits.detach() + scale * noise)
    mask = torch.ones_like(SEQUENCES, dtype=torch.bool)
    weights = importance_weights(own, drawn, mask, **correction) if correction else 1
    chances = drawn.sum(1, keepdim=True).exp()  # of being drawn, in the place of draws
    loss = policy_loss(
        own, own.detach(), (chances * reward).expand_as(own) * weights, mask, cliprange=0.2
    )
    (estimated,) = torch.autograd.grad(-loss.total, logits)
    return true, estimated


def bias(scale, **correction):
    true, estimated = gradients(scale, **correction)
    return float((estimated - true).norm() / true.norm())


def test_a_perturbed_sampler_biases_the_gradient_and_weights_of_responses_mend_it():
    assert bias(0.0) < 1e-12
    assert bias(0.5) > 0.2
    assert bias(0.5, cap=1e9, level="sequence") < 1e-12
    # Truncation keeps little of the bias, and tokens' weights, which know only themselves, less.
    assert bias(0.5, cap=3.0, level="sequence") < bias(0.5) / 4
    assert bias(0.5, cap=3.0) < 0.75 * bias(0.5)
    # What is masked is not learnt from: little where the two are near.
    assert bias(0.05, cap=2.0, floor=0.5, level="sequence", masks=True) < bias(0.05) / 20


def test_an_estimate_from_draws_is_within_its_error_of_on_policy_where_it_is_weighed():
    """By 40,000 draws, of which some 4 standard errors tell a bias from chance."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    reward = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
    (true,) = torch.autograd.grad((logits.softmax(-1) * reward).sum(), logits)
    perturbed = (logits.detach() + torch.tensor([0.6, -0.6, 0.0])).log_softmax(-1)
    tokens = torch.multinomial(perturbed.exp(), 40_000, replacement=True, generator=generator)
    own = logits.log_softmax(-1)[tokens][:, None]
    mask = torch.ones_like(own, dtype=torch.bool)
    weights = importance_weights(own, perturbed[tokens][:, None], mask, cap=4.0)
    steps = torch.eye(VOCABULARY, dtype=torch.float64)[tokens] - logits.detach().softmax(-1)

    def distance(factors):
        terms = factors * reward[tokens][:, None] * steps
        errors = terms.std(0) / len(tokens) ** 0.5
        return float(((terms.mean(0) - true).abs() / errors).max())

    assert distance(weights) < 4
    assert distance(torch.ones_like(weights)) > 20
