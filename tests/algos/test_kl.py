"""Estimates of KL against its definition, and the controller of its coefficient by hand."""

import math

import pytest
import torch

from dschat_lora.algos.kl import KL_ESTIMATORS, adapted_kl_coef, kl_k1, kl_k3

LOG2 = math.log(2)
P = [0.5, 0.3, 0.15, 0.05]
Q = [0.1, 0.2, 0.3, 0.4]


def logs(values):
    return torch.tensor(values, dtype=torch.float64).log().requires_grad_()


@pytest.mark.parametrize("estimate", [kl_k1, kl_k3])
def test_expectation_over_the_tokens_of_p_is_the_divergence(estimate):
    divergence = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
    mean = torch.tensor(P, dtype=torch.float64) @ estimate(logs(P), logs(Q))
    assert mean.item() == pytest.approx(divergence, abs=1e-10)


@pytest.mark.parametrize(("p", "q"), [(0.5, 0.25), (0.25, 0.5), (0.25, 0.25)])
def test_single_tokens_by_hand(p, q):
    expected = {"k1": math.log(p / q), "k2": math.log(p / q) ** 2 / 2}
    expected["k3"] = q / p - 1 - math.log(q / p)
    for name, estimate in KL_ESTIMATORS.items():
        assert estimate(logs([p]), logs([q])).item() == pytest.approx(expected[name], abs=1e-12)


def test_k3_is_never_negative_even_where_the_ratio_is_one_to_fp32():
    closeness = torch.logspace(-9, 1, 41)
    for difference in (closeness, -closeness):
        assert (kl_k3(torch.zeros(41), difference) >= 0).all()
    # half the square of a small difference, which 1 - 1 in fp32 would lose
    assert kl_k3(torch.zeros(1), torch.tensor([1e-4])).item() == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize(
    ("estimate", "slope"), [(kl_k1, lambda p, q: 1.0), (kl_k3, lambda p, q: 1 - q / p)]
)
def test_gradient_reaches_both_sides_and_is_equal_and_opposite(estimate, slope):
    logprobs, reference = logs(P), logs(Q)
    estimate(logprobs, reference).sum().backward()
    expected = [slope(p, q) for p, q in zip(P, Q, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-10)
    assert reference.grad.tolist() == pytest.approx([-x for x in expected], abs=1e-10)


@pytest.mark.parametrize(
    ("name", "divergence"),
    [("k1", None), ("k2", lambda p, q: p * (p / q).log()), ("k3", lambda p, q: q * (q / p).log())],
)
def test_gradient_in_the_loss_is_that_of_the_documented_divergence(name, divergence):
    """Over tokens drawn from p: nothing for k1, KL(p || q) for k2, KL(q || p) for k3."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(5, generator=generator, dtype=torch.float64).softmax(0)
    p = logits.softmax(0)
    values = KL_ESTIMATORS[name](p.log(), q.log())
    (slope,) = torch.autograd.grad((p.detach() * values).sum(), logits, retain_graph=True)
    expected = torch.zeros(5, dtype=torch.float64)
    if divergence is not None:
        (expected,) = torch.autograd.grad(divergence(p, q).sum(), logits)
    torch.testing.assert_close(slope, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("estimate", [kl_k1, kl_k3])
def test_a_token_with_junk_leaves_the_others_alone(estimate):
    dirty = estimate(torch.tensor([-1.0, math.nan, -math.inf]), torch.tensor([-2.0, 0.0, 0.0]))
    assert dirty[0] == estimate(torch.tensor(-1.0), torch.tensor(-2.0))


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (6.6, 0.1 * (1 + 0.1 * 0.05)),
        (5.4, 0.1 * (1 - 0.1 * 0.05)),
        (7.2, 0.1 * (1 + 0.2 * 0.05)),
        (60.0, 0.1 * (1 + 0.2 * 0.05)),
        (0.0, 0.1 * (1 - 0.2 * 0.05)),
        (-3.0, 0.1 * (1 - 0.2 * 0.05)),
    ],
    ids=["on target", "above", "below", "at the clip", "far above", "far below", "negative"],
)
def test_coefficient_answers_to_the_relative_error_up_to_a_fifth(kl, expected):
    adapted = adapted_kl_coef(0.1, kl=kl, target=6.0, horizon=1280, num_samples=64)
    assert adapted == pytest.approx(expected, rel=1e-12)


def test_coefficient_moves_as_far_for_two_batches_as_for_one_of_twice_the_size():
    step = {"kl": 9.0, "target": 6.0, "horizon": 1e6}
    once = adapted_kl_coef(1.0, num_samples=64, **step)
    twice = adapted_kl_coef(adapted_kl_coef(1.0, num_samples=32, **step), num_samples=32, **step)
    assert once - 1 == pytest.approx(0.2 * 64 / 1e6, rel=1e-9)
    assert twice - 1 == pytest.approx(once - 1, rel=1e-4)


def test_a_divergence_that_is_no_number_does_not_pass_for_a_coefficient():
    assert math.isnan(adapted_kl_coef(0.1, kl=math.nan, target=6.0, horizon=100, num_samples=8))


def test_a_horizon_that_could_turn_the_sign_of_the_coefficient_is_refused():
    step = {"kl": 0.0, "target": 6.0, "num_samples": 100}
    with pytest.raises(ValueError, match=r"20 samples .* batches of 100: it must exceed 20\.0"):
        adapted_kl_coef(0.1, horizon=20, **step)
    assert adapted_kl_coef(0.1, horizon=21, **step) == pytest.approx(0.1 / 21)
