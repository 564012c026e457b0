"""Advantages against plain loops over lists, and what padding, rows and groups must not change."""

import math
import statistics
from functools import partial

import pytest
import torch

from dschat_lora.algos.advantages import (
    RunningMoments,
    discounted_returns,
    dr_grpo_advantages,
    explained_variance,
    gae,
    grpo_advantages,
    response_sums,
    rloo_advantages,
    soft_overlong_punishment,
    to_tokens,
    token_rewards,
    whiten,
)

NAN, INF = math.nan, math.inf
LENGTHS = [3, 0, 7, 1, 4]  # the longest is as long as the batch
WIDTH = 7
JUNK = [NAN, INF, -INF, 1e300]


def mask_of(lengths=LENGTHS, width=WIDTH):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(number, seed=0):
    return draws(number, len(LENGTHS), WIDTH, seed=seed).unbind()


def rows_of(tensor, lengths=LENGTHS):
    """A list for each response, of its tokens alone."""
    return [row[:length].tolist() for row, length in zip(tensor, lengths, strict=True)]


def padded(rows, width=WIDTH):
    """What a function should return for the lists of its tokens: 0 elsewhere."""
    whole = [row + [0.0] * (width - len(row)) for row in rows]
    return torch.tensor(whole, dtype=torch.float64)


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def mean(numbers):
    return sum(numbers) / len(numbers)


# token_rewards


def test_reward_is_the_penalty_at_each_token_and_the_score_at_the_last():
    scores, (kl,) = draws(len(LENGTHS), seed=1), batch(1)
    expected = [[-0.3 * value for value in row] for row in rows_of(kl)]
    for row, score in zip(expected, scores.tolist(), strict=True):
        if row:
            row[-1] += score
    close(token_rewards(scores, kl, mask_of(), kl_coef=0.3), padded(expected))


@pytest.mark.parametrize("junk", JUNK)
def test_score_of_a_response_without_tokens_counts_nowhere(junk):
    scores, mask = torch.tensor([1.0, junk]), mask_of([2, 0], 3)
    rewards = token_rewards(scores, torch.zeros(2, 3), mask, kl_coef=0.1)
    assert rewards.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("shape", [(3,), (1,), (2, 1)])
def test_scores_that_do_not_match_the_responses_are_refused(shape):
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"shapes differ: .*responses \(2,\)"):
        token_rewards(torch.zeros(shape), torch.zeros(2, 4), mask, kl_coef=0.1)


def test_overlong_punishment_falls_over_the_last_tokens_alone():
    lengths = torch.tensor([0, 11, 12, 13, 15, 16, 20])
    punishment = soft_overlong_punishment(lengths, max_length=16, cache=4)
    assert punishment.tolist() == [0.0, 0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert punishment.dtype == torch.float64


# gae, discounted_returns


def slow_gae(rewards, values, gamma, lam):
    """Of one response: eq. 16 of the paper, every sum to the end of the episode."""
    length, values = len(rewards), [*values, 0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    return [
        sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, length)) for t in range(length)
    ]


@pytest.mark.parametrize(
    ("gamma", "lam"),
    [(1.0, 0.95), (0.97, 0.9), (0.99, 1.0), (1.0, 1.0), (0.9, 0.0), (0.0, 0.9), (0.0, 0.0)],
)
def test_gae_is_the_discounted_sum_of_temporal_differences_over_any_length(gamma, lam):
    lengths = range(18)
    mask, (rewards, values) = mask_of(lengths, 17), draws(2, 18, 17)
    before = rewards.clone(), values.clone()
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    rows = zip(rows_of(rewards, lengths), rows_of(values, lengths), strict=True)
    expected = padded([slow_gae(*row, gamma, lam) for row in rows], 17)
    close(advantages, expected)
    close(returns, expected + torch.where(mask, values, 0))
    assert torch.equal(rewards, before[0])
    assert torch.equal(values, before[1])


def test_gae_by_hand():
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = gae(rewards, values, torch.tensor([[True, True]]), gamma=0.5, lam=0.5)
    # deltas 0 + 0.125 - 0.5 and 1 - 0.25
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.75, 0.75]]
    assert returns.tolist() == [[-0.375 + 0.25 * 0.75 + 0.5, 1.0]]


def test_returns_are_the_discounted_sums_of_what_follows():
    (rewards,) = batch(1)
    returns = discounted_returns(rewards, mask_of(), gamma=0.9)
    expected = [
        [sum(0.9 ** (s - t) * row[s] for s in range(t, len(row))) for t in range(len(row))]
        for row in rows_of(rewards)
    ]
    close(returns, padded(expected))


# whiten


def test_whitening_is_a_shift_and_a_scaling_by_the_standard_deviation_of_the_population():
    for values in (3 + 10 * batch(1)[0], 1e-3 * batch(1)[0]):
        numbers = [x for row in rows_of(values) for x in row]
        middle = mean(numbers)
        deviation = math.sqrt(mean([(x - middle) ** 2 for x in numbers]) + 1e-8)
        expected = [[(x - middle) / deviation for x in row] for row in rows_of(values)]
        close(whiten(values, mask_of()), padded(expected))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1000.1, -3e4])
@pytest.mark.parametrize("lengths", [[1], [3, 0, 2], [997]], ids=["single", "some", "many"])
def test_whitening_what_does_not_vary_gives_zero(constant, lengths):
    mask = mask_of(lengths, max(lengths) + 1)
    whitened = whiten(torch.full(mask.shape, constant), mask)
    # fp64 rounds off 1e-16 of the constant, against an eps of 1e-4 on the deviation
    torch.testing.assert_close(whitened, torch.zeros(mask.shape), rtol=0, atol=1e-7)


def test_whitening_sees_a_difference_of_one_unit_of_fp32():
    values = torch.tensor([[16777214.0, 16777215.0]])
    whitened = whiten(values, torch.tensor([[True, True]]))
    assert whitened.tolist() == [pytest.approx([-1.0, 1.0])]


# response_sums, to_tokens


def test_sums_are_over_the_tokens_of_each_response():
    (values,) = batch(1)
    leaf = values.clone().requires_grad_()
    sums = response_sums(leaf, mask_of())
    assert sums.tolist() == pytest.approx([sum(row) for row in rows_of(values)], abs=1e-10)
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).sum().backward()
    close(leaf.grad, padded([[i + 1.0] * length for i, length in enumerate(LENGTHS)]))


def test_an_advantage_of_a_response_is_that_of_its_tokens_and_of_no_other():
    advantages = draws(len(LENGTHS))
    expected = [[x] * length for x, length in zip(advantages.tolist(), LENGTHS, strict=True)]
    close(to_tokens(advantages, mask_of()), padded(expected))
    with pytest.raises(ValueError, match=r"advantages \(1,\), responses \(5,\)"):
        to_tokens(torch.zeros(1), mask_of())


# advantages by comparison with a group


GROUPS = [4, 1, 4, 9, 1, 4, 4, 15]  # 9 and 15 are alone


def slow_grpo(reward, others):
    group = [reward, *others]
    return (reward - mean(group)) / (statistics.stdev(group) + 1e-4)


ESTIMATORS = {
    rloo_advantages: lambda reward, others: reward - mean(others),
    grpo_advantages: slow_grpo,
    dr_grpo_advantages: lambda reward, others: reward - mean([reward, *others]),
}
each_estimator = pytest.mark.parametrize("advantages_of", ESTIMATORS, ids=lambda f: f.__name__)


@each_estimator
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_response_is_compared_with_the_others_of_its_group(advantages_of, scale):
    rewards = scale * (2 + draws(len(GROUPS)))
    expected = []
    for i, group in enumerate(GROUPS):
        others = [rewards[j].item() for j in range(len(GROUPS)) if GROUPS[j] == group and j != i]
        slow = ESTIMATORS[advantages_of]
        expected.append(slow(rewards[i].item(), others) if others else 0.0)
    advantages = advantages_of(rewards, torch.tensor(GROUPS))
    close(advantages, torch.tensor(expected, dtype=torch.float64))


@each_estimator
@pytest.mark.parametrize("reward", [0.1, 1000.1, -3e4])
def test_equal_rewards_are_no_advantage_although_their_mean_is_rounded(advantages_of, reward):
    advantages = advantages_of(torch.full((7,), reward), torch.tensor([0] * 7))
    torch.testing.assert_close(advantages, torch.zeros(7), rtol=0, atol=1e-7)


@each_estimator
def test_a_group_s_advantages_are_its_own_in_the_precision_of_the_input(advantages_of):
    rewards, groups = torch.tensor([1.0, NAN, 3.0, 4.0, 5.0]), torch.tensor([0, 1, 1, 0, 2])
    advantages = advantages_of(rewards.requires_grad_(), groups)
    assert advantages.isnan().tolist() == [False, True, True, False, False]
    assert (advantages.dtype, advantages.requires_grad) == (torch.float32, False)
    assert advantages_of(rewards[:0], groups[:0]).shape == (0,)
    with pytest.raises(ValueError, match=r"rewards \(5,\), groups \(1,\)"):
        advantages_of(rewards, groups[:1])


# explained_variance


def variance(numbers):
    return mean([(x - mean(numbers)) ** 2 for x in numbers])


def test_explained_variance_is_what_the_errors_leave_over():
    values, returns = batch(2)
    pairs = [
        pair
        for rows in zip(rows_of(values), rows_of(returns), strict=True)
        for pair in zip(*rows, strict=True)
    ]
    expected = 1 - variance([r - v for v, r in pairs]) / variance([r for _, r in pairs])
    explained = explained_variance(values, returns, mask_of())
    assert explained.shape == ()
    assert explained.item() == pytest.approx(expected, abs=1e-10)


def test_explained_variance_by_hand():
    returns = torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert explained_variance(returns - 5, returns, mask).item() == 1.0
    assert explained_variance(torch.full((2, 2), 7.0), returns, mask).item() == 0.0
    assert explained_variance(-returns, returns, mask).item() == -3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 3, 7])
def test_returns_that_do_not_vary_leave_nothing_to_explain(length, dtype):
    mask = mask_of([length], 8)
    returns = torch.full((1, 8), 0.1, dtype=dtype)
    assert explained_variance(draws(1, 8).to(dtype), returns, mask).item() == 0.0


# RunningMoments


def seen(*tensors):
    moments = RunningMoments()
    for tensor in tensors:
        moments = moments.updated(tensor)
    return moments


def test_moments_of_values_in_batches_are_those_of_all_at_once():
    whole = 1e4 + draws(37)
    for values in (whole, whole.float()):  # taken in fp64 whatever the values are in
        moments = seen(*values.split([5, 1, 20, 0, 11]))
        numbers = values.tolist()
        assert moments.count == 37
        assert moments.mean == pytest.approx(mean(numbers), rel=1e-14)
        # rtol: squares of numbers whose own rounding is 1e-12 of their spread
        assert moments.m2 == pytest.approx(37 * variance(numbers), rel=1e-10)
        assert moments.std == pytest.approx(statistics.stdev(numbers), rel=1e-10)


def test_moments_by_hand():
    assert seen(torch.tensor([1.0, 3.0])) == RunningMoments(count=2.0, mean=2.0, m2=2.0)
    moments = seen(torch.tensor([[1.0], [3.0]]), torch.tensor([8.0]))
    assert moments == RunningMoments(count=3.0, mean=4.0, m2=26.0)
    assert moments.std == pytest.approx(math.sqrt(13))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_do_not_vary_are_to_be_scaled_by_one(dtype):
    assert seen().std == 1.0
    assert seen(torch.tensor([3.0], dtype=dtype)).std == 1.0
    constant = torch.full((7,), 0.1, dtype=dtype)
    assert seen(constant, constant[:3], constant[:1]).std == 1.0


@pytest.mark.filterwarnings("error")
def test_moments_are_plain_numbers_that_a_checkpoint_can_hold():
    moments = seen(torch.tensor([1.0, 3.0], requires_grad=True))
    assert [type(x) for x in vars(moments).values()] == [float, float, float]
    assert moments.updated(torch.zeros(0)) == moments


# What holds for all of them: as functions of tensors over tokens, then of the mask.


def rewards_of(kl, scores, mask):
    return token_rewards(response_sums(scores, mask), kl, mask, kl_coef=0.3)


def tuple_of(function):
    def wrapped(*arguments):
        result = function(*arguments)
        return result if isinstance(result, tuple) else (result,)

    return wrapped


OVER_TOKENS = {
    "token_rewards": (2, rewards_of),
    "gae": (2, partial(gae, gamma=0.97, lam=0.9)),
    "whiten": (1, whiten),
    "response_sums": (1, response_sums),
    "explained_variance": (2, explained_variance),
}
over_tokens = pytest.mark.parametrize(
    ("number", "function"),
    [(number, tuple_of(function)) for number, function in OVER_TOKENS.values()],
    ids=OVER_TOKENS,
)


@over_tokens
@pytest.mark.parametrize("junk", JUNK)
def test_padding_may_hold_anything_and_be_wider(number, function, junk):
    tensors, wide_mask = batch(number), mask_of(width=WIDTH + 9)
    dirty = [torch.where(mask_of(), tensor, junk) for tensor in tensors]
    wide = [torch.nn.functional.pad(tensor, (0, 9), value=junk) for tensor in dirty]
    results = function(*tensors, mask_of()), function(*dirty, mask_of()), function(*wide, wide_mask)
    for clean, same, wider in zip(*results, strict=True):
        assert torch.equal(clean, same)
        if wider.dim() == 2:
            assert not wider[:, WIDTH:].any()
        # sums over all tokens take another order
        close(wider[:, :WIDTH] if wider.dim() == 2 else wider, clean)


@over_tokens
def test_order_of_the_responses_does_not_matter(number, function):
    tensors, order = batch(number), torch.tensor([3, 0, 4, 2, 1])
    expected = function(*tensors, mask_of())
    results = function(*(tensor[order] for tensor in tensors), mask_of()[order])
    for before, after in zip(expected, results, strict=True):
        close(after, before[order] if before.dim() else before)


@over_tokens
@pytest.mark.parametrize("shape", [(5, 0), (5, 3), (0, 4)])
def test_without_tokens_or_responses_all_is_zero(number, function, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    for result in function(*[torch.full(shape, NAN)] * number, mask):
        assert result.shape in [shape, shape[:1], ()]
        assert not result.any()


@over_tokens
def test_precision_is_that_of_the_input_and_targets_carry_no_gradient(number, function):
    leaves = [tensor.float().requires_grad_() for tensor in batch(number)]
    for result in function(*leaves, mask_of()):
        assert result.dtype == torch.float32
        assert result.requires_grad == (function is over_tokens.args[1][3][1])


@over_tokens
def test_a_tensor_that_would_broadcast_is_refused(number, function):
    for position in range(number):
        tensors = list(batch(number))
        tensors[position] = tensors[position][:, :1]
        with pytest.raises(ValueError, match=r"shapes differ: .*\(5, 1\).*mask \(5, 7\)"):
            function(*tensors, mask_of())
