"""Losses, advantages and estimators after PPO, RLOO and GRPO against loops over single tokens."""

import math

import pytest
import torch

from dschat_lora.algos.advantages import (
    discounted_returns,
    dr_grpo_advantages,
    soft_overlong_punishment,
)
from dschat_lora.algos.kl import KL_ESTIMATORS
from dschat_lora.algos.ppo import cispo_loss, gspo_loss, loss_divisor, policy_loss, token_weights

NAN = math.nan
LENGTHS, WIDTH = [3, 0, 5, 1, 4], 6
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def draws(number, scale=0.5, seed=0):
    """fp64 tensors of a batch with NaN in the padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (number, *MASK.shape)
    values = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return list(torch.where(MASK, values, NAN))


def rows_of(*tensors):
    """The tokens of each response that has some, as lists of tuples of leaf-like scalars."""
    for row, length in enumerate(LENGTHS):
        if length:
            yield [tuple(tensor[row, t] for tensor in tensors) for t in range(length)]


def gradient(total, leaf):
    (found,) = torch.autograd.grad(total, leaf, retain_graph=True)
    return torch.where(MASK, found, 0)


def agree(loss, leaf, total, clipped):
    """Value, gradient and number of clipped tokens are those of the loop."""
    assert loss.total.item() == pytest.approx(total.item(), abs=1e-10)
    torch.testing.assert_close(
        gradient(loss.total, leaf), gradient(total, leaf), atol=1e-10, rtol=0
    )
    assert 0 < clipped < sum(LENGTHS)
    assert loss.clipped.item() == clipped


def clipped_objective(ratio, advantage, low, high, dual=None):
    """The objective of a token, and whether a bound holds it."""
    bounded = min(max(ratio.item(), 1 - low), 1 + high)
    held = advantage * bounded < advantage * ratio
    value = advantage * bounded if held else advantage * ratio
    if dual is not None and advantage < 0 and value < dual * advantage:
        return dual * advantage, True
    return value, bool(held)


@pytest.mark.parametrize("dual", [None, 1.3])
def test_clip_higher_and_dual_clip_are_those_of_the_loop(dual):
    new, old, advantages = draws(3)
    new.requires_grad_()
    loss = policy_loss(
        new, old, advantages, MASK, cliprange=0.1, cliprange_high=0.4, dual_clip=dual or 0.0
    )
    total, clipped, dual_acts = 0.0 * new[0, 0], 0, 0
    for tokens in rows_of(new, old, advantages):
        for p, q, a in tokens:
            value, held = clipped_objective(torch.exp(p - q), a, 0.1, 0.4, dual)
            total, clipped = total - value, clipped + held
            dual_acts += bool(a < 0 and torch.exp(p - q) > (dual or math.inf))
    agree(loss, new, total, clipped)
    assert (dual_acts > 0) == (dual is not None)


@pytest.mark.parametrize("dual", [None, 1.1])
def test_gspo_has_one_ratio_for_a_response(dual):
    new, old, advantages = draws(3, scale=0.7, seed=3)
    advantages = torch.where(MASK, advantages[:, :1].nan_to_num(), NAN)  # as GSPO has them
    new.requires_grad_()
    loss = gspo_loss(
        new, old, advantages, MASK, cliprange=0.05, cliprange_high=0.1, dual_clip=dual or 0.0
    )
    total, clipped = 0.0 * new[0, 0], 0
    for tokens in rows_of(new, old, advantages):
        mean = sum(p - q for p, q, _ in tokens) / len(tokens)
        for _, _, a in tokens:
            value, held = clipped_objective(torch.exp(mean), a, 0.05, 0.1, dual)
            total, clipped = total - value, clipped + held
    agree(loss, new, total, clipped)


def test_gspo_weighed_by_sequence_is_equation_5_of_its_paper():
    new, old, _ = draws(3, scale=0.4, seed=5)
    advantages = torch.tensor([1.0, 9.0, -2.0, 0.5, -1.0], dtype=torch.float64)
    weights = token_weights(MASK, "sequence", max_length=1, dtype=torch.float64)
    loss = gspo_loss(new, old, weights * advantages[:, None], MASK, cliprange=0.1)
    found = -loss.total.item() / loss_divisor(LENGTHS, "sequence")
    values = []
    for n, length in enumerate(LENGTHS):
        if length:
            ratio = math.exp(sum((new - old)[n, :length].tolist()) / length)
            a = advantages[n].item()
            values.append(min(ratio * a, min(max(ratio, 0.9), 1.1) * a))
    assert found == pytest.approx(sum(values) / len(values), abs=1e-10)


def test_cispo_keeps_the_gradient_of_every_token():
    new, old, advantages = draws(3, seed=7)
    new.requires_grad_()
    loss = cispo_loss(new, old, advantages, MASK, cliprange=0.4, cliprange_high=0.2)
    total, clipped = 0.0 * new[0, 0], 0
    for tokens in rows_of(new, old, advantages):
        for p, q, a in tokens:
            ratio = math.exp(p.item() - q.item())
            bounded = min(max(ratio, 0.6), 1.2)
            total, clipped = total - bounded * a * p, clipped + (bounded != ratio)
    agree(loss, new, total, clipped)
    assert (gradient(loss.total, new)[MASK] != 0).all()


@pytest.mark.parametrize("loss", [policy_loss, gspo_loss, cispo_loss])
def test_divergence_and_ratio_error_are_those_of_tokens_in_every_loss(loss):
    new, old, advantages = draws(3, seed=11)
    found = loss(new, old, advantages, MASK, cliprange=0.2)
    ratios = [torch.exp(p - q).item() for tokens in rows_of(new, old) for p, q in tokens]
    kl = sum(ratio - 1 - math.log(ratio) for ratio in ratios)
    assert found.approx_kl.item() == pytest.approx(kl, abs=1e-10)
    assert found.ratio_error.item() == pytest.approx(max(abs(r - 1) for r in ratios), abs=1e-10)


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        # The mean over tokens, over responses, and by the longest response.
        ("token", lambda rows: sum(sum(r) for r in rows) / sum(len(r) for r in rows)),
        ("sequence", lambda rows: sum(sum(r) / len(r) for r in rows) / len(rows)),
        ("constant", lambda rows: sum(sum(r) / 8 for r in rows) / len(rows)),
    ],
)
def test_weights_and_divisor_make_the_mean_that_they_name(normalization, expected):
    (values,) = draws(1)
    weights = token_weights(MASK, normalization, max_length=8, dtype=torch.float64)
    assert (weights[~MASK] == 0).all()
    total = sum((weights * values)[MASK].tolist())
    rows = [[x.item() for (x,) in tokens] for tokens in rows_of(values)]
    found = total / loss_divisor(LENGTHS, normalization)
    assert found == pytest.approx(expected(rows), abs=1e-10)


def test_k2_is_half_the_squared_log_ratio():
    new, reference = draws(2)
    found = KL_ESTIMATORS["k2"](new, reference)
    for value, p, q in ((v, p, q) for row in rows_of(found, new, reference) for v, p, q in row):
        assert value.item() == pytest.approx((p.item() - q.item()) ** 2 / 2, abs=1e-10)


@pytest.mark.parametrize(
    ("name", "divergence"),
    [("k1", None), ("k2", lambda p, q: p * (p / q).log()), ("k3", lambda p, q: q * (q / p).log())],
)
def test_gradient_of_an_estimator_in_the_loss_is_that_of_the_documented_divergence(
    name, divergence
):
    """Over tokens drawn from p: nothing for k1, KL(p || q) for k2, KL(q || p) for k3."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    q = torch.randn(5, generator=generator, dtype=torch.float64).softmax(0)
    p = logits.softmax(0)
    values = KL_ESTIMATORS[name](p.log(), q.log())
    (found,) = torch.autograd.grad((p.detach() * values).sum(), logits, retain_graph=True)
    expected = torch.zeros(5, dtype=torch.float64)
    if divergence is not None:
        (expected,) = torch.autograd.grad(divergence(p, q).sum(), logits)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_dr_grpo_advantage_is_the_distance_from_the_groups_mean():
    rewards = torch.tensor([1.0, 2.0, 6.0, 4.0, 7.0, 5.0], dtype=torch.float64)
    groups = torch.tensor([0, 3, 0, 3, 8, 0])
    # Means of groups 0 and 3 are 4 and 3; group 8 has one response.
    expected = torch.tensor([-3.0, -1.0, 2.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(dr_grpo_advantages(rewards, groups), expected, atol=1e-10, rtol=0)


def test_returns_are_the_discounted_sums_of_what_follows():
    (rewards,) = draws(1)
    found = discounted_returns(rewards, MASK, gamma=0.9)
    for n, length in enumerate(LENGTHS):
        for t in range(WIDTH):
            own = [0.9 ** (k - t) * rewards[n, k].item() for k in range(t, length)]
            assert found[n, t].item() == pytest.approx(sum(own), abs=1e-10)


def test_overlong_punishment_falls_over_the_last_tokens_alone():
    lengths = torch.tensor([0, 11, 12, 13, 15, 16, 20])
    found = soft_overlong_punishment(lengths, max_length=16, cache=4)
    assert found.tolist() == [0.0, 0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert found.dtype == torch.float64
