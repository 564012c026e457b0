"""PPO's two losses against loops over tokens, and where their clips act by hand."""

import math

import pytest
import torch

from dschat_lora.algos.ppo import policy_loss, value_loss

NAN, INF = math.nan, math.inf
LENGTHS = [3, 0, 5, 1]
WIDTH = 6


def mask_of(lengths=LENGTHS, width=WIDTH):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def draws(number, scale=1.0, seed=0):
    """Tensors of junk-free numbers, in the layout of a batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), WIDTH)
    return [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(number)
    ]


def tokens_of(*tensors):
    """The numbers of each response token, one tuple for each."""
    for row, length in enumerate(LENGTHS):
        yield from zip(*(tensor[row, :length].tolist() for tensor in tensors), strict=True)


def one(*values):
    return [torch.tensor([[value]], dtype=torch.float64) for value in values]


TRUE = torch.tensor([[True]])


def test_policy_loss_is_the_sum_over_tokens():
    logprobs, old, advantages = draws(3, scale=0.4)
    loss = policy_loss(logprobs, old, advantages, mask_of(), cliprange=0.2)
    total, clipped, kl, error = 0.0, 0, 0.0, 0.0
    for new_one, old_one, advantage in tokens_of(logprobs, old, advantages):
        ratio = math.exp(new_one) / math.exp(old_one)
        bounded = min(max(ratio, 0.8), 1.2)
        total -= min(advantage * ratio, advantage * bounded)
        clipped += advantage * bounded < advantage * ratio
        kl += ratio - 1 - math.log(ratio)
        error = max(error, abs(ratio - 1))
    assert 0 < clipped < sum(LENGTHS)
    found = [loss.total, loss.clipped, loss.approx_kl, loss.ratio_error]
    assert [x.item() for x in found] == pytest.approx([total, clipped, kl, error], abs=1e-10)
    assert all(x.shape == () and x.dtype == torch.float64 for x in found)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "slope", "clipped"),
    [
        (1.0, 1.5, -1.2, 0.0, 1),
        (1.0, 0.5, -0.5, -0.5, 0),
        (-1.0, 1.5, 1.5, 1.5, 0),
        (-1.0, 0.5, 0.8, 0.0, 1),
        (2.0, 1.1, -2.2, -2.2, 0),
        (-2.0, 0.9, 1.8, 1.8, 0),
        (0.0, 1.5, 0.0, 0.0, 0),
    ],
    ids=[
        "gain capped",
        "gain free to recover",
        "harm never capped",
        "harm capped",
        "gain within",
        "harm within",
        "nothing to gain",
    ],
)
def test_policy_clip_acts_in_the_direction_of_gain_only(advantage, ratio, expected, slope, clipped):
    logprobs, old, advantages = one(math.log(ratio) - 1.0, -1.0, advantage)
    logprobs.requires_grad_()
    loss = policy_loss(logprobs, old, advantages, TRUE, cliprange=0.2)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(expected)
    assert logprobs.grad.item() == pytest.approx(slope)
    assert loss.clipped.item() == clipped


def test_policy_gradient_of_the_policy_that_drew_is_minus_the_advantage():
    old, advantages = draws(2)
    logprobs = old.clone().requires_grad_()
    loss = policy_loss(logprobs, old, advantages, mask_of(), cliprange=0.2)
    loss.total.backward()
    expected = [-advantage for (advantage,) in tokens_of(advantages)]
    assert logprobs.grad[mask_of()].tolist() == pytest.approx(expected, abs=1e-10)
    assert not logprobs.grad[~mask_of()].any()
    assert loss.ratio_error.item() == loss.clipped.item() == loss.approx_kl.item() == 0.0
    assert loss.total.item() == pytest.approx(sum(expected), abs=1e-10)


def test_policy_gradient_is_the_derivative_of_the_loss():
    logprobs, old, advantages = draws(3, scale=0.4)
    logprobs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, old, advantages, mask_of(), cliprange=0.2).total, logprobs
    )


def test_policy_loss_has_a_gradient_to_the_new_logprobs_alone():
    leaves = [x.requires_grad_() for x in draws(3)]
    loss = policy_loss(*leaves, mask_of(), cliprange=0.2)
    assert not any(x.requires_grad for x in (loss.clipped, loss.approx_kl, loss.ratio_error))
    loss.total.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]


@pytest.mark.parametrize("ratio", [1.5, 0.6])
def test_approximate_kl_is_that_of_the_old_policy_from_the_new(ratio):
    logprobs, old, advantages = one(math.log(ratio), 0.0, 1.0)
    loss = policy_loss(logprobs, old, advantages, TRUE, cliprange=0.2)
    assert loss.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-12)
    assert loss.ratio_error.item() == pytest.approx(abs(ratio - 1), abs=1e-12)


def test_value_loss_is_the_sum_over_tokens():
    values, old, returns = draws(3, scale=0.5, seed=1)
    loss = value_loss(values, old, returns, mask_of(), cliprange_value=0.2)
    total, clipped = 0.0, 0
    for value, old_value, target in tokens_of(values, old, returns):
        near = min(max(value, old_value - 0.2), old_value + 0.2)
        total += 0.5 * max((value - target) ** 2, (near - target) ** 2)
        clipped += (near - target) ** 2 > (value - target) ** 2
    assert 0 < clipped < sum(LENGTHS)
    found = [loss.total, loss.clipped]
    assert [x.item() for x in found] == pytest.approx([total, clipped], abs=1e-10)
    assert all(x.shape == () and x.dtype == torch.float64 for x in found)


@pytest.mark.parametrize(
    ("value", "target", "expected", "slope", "clipped"),
    [
        (1.5, 2.0, 0.5 * 0.8**2, 0.0, 1),
        (1.5, 0.0, 0.5 * 1.5**2, 1.5, 0),
        (0.5, 0.0, 0.5 * 0.8**2, 0.0, 1),
        (0.5, 2.0, 0.5 * 1.5**2, -1.5, 0),
        (1.1, 2.0, 0.5 * 0.9**2, -0.9, 0),
    ],
    ids=["up far enough", "up and wrong", "down far enough", "down and wrong", "within"],
)
def test_value_clip_acts_on_progress_only(value, target, expected, slope, clipped):
    values, old, returns = one(value, 1.0, target)
    values.requires_grad_()
    loss = value_loss(values, old, returns, TRUE, cliprange_value=0.2)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(expected)
    assert values.grad.item() == pytest.approx(slope)
    assert loss.clipped.item() == clipped


def test_value_loss_where_values_stand_is_half_the_squared_error():
    values, returns = draws(2)
    leaf = values.clone().requires_grad_()
    loss = value_loss(leaf, values, returns, mask_of(), cliprange_value=0.2)
    loss.total.backward()
    errors = [value - target for value, target in tokens_of(values, returns)]
    assert loss.total.item() == pytest.approx(sum(e * e / 2 for e in errors), abs=1e-10)
    assert leaf.grad[mask_of()].tolist() == pytest.approx(errors, abs=1e-10)
    assert not leaf.grad[~mask_of()].any()
    assert loss.clipped.item() == 0.0


def test_a_value_within_the_clip_does_not_count_as_clipped_for_a_rounding():
    generator = torch.Generator().manual_seed(2)
    old, returns = torch.randn(2, 1, 500, generator=generator)
    values = old + 0.1 * torch.rand(1, 500, generator=generator)
    everywhere = torch.ones(1, 500, dtype=torch.bool)
    assert value_loss(values, old, returns, everywhere, cliprange_value=0.2).clipped == 0


def test_value_gradient_is_the_derivative_of_the_loss():
    values, old, returns = draws(3, scale=0.5)
    values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old, returns, mask_of(), cliprange_value=0.2).total, values
    )


def test_value_loss_has_a_gradient_to_the_new_values_alone():
    leaves = [x.requires_grad_() for x in draws(3)]
    loss = value_loss(*leaves, mask_of(), cliprange_value=0.2)
    assert not loss.clipped.requires_grad
    loss.total.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]


def of_policy(*tensors, mask):
    return policy_loss(*tensors, mask, cliprange=0.2)


def of_values(*tensors, mask):
    return value_loss(*tensors, mask, cliprange_value=0.2)


@pytest.mark.parametrize("loss_of", [of_policy, of_values])
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e300])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_padding_may_hold_anything(loss_of, junk, position):
    clean, dirty = draws(3), draws(3)
    dirty[position][~mask_of()] = junk
    clean[0].requires_grad_()
    dirty[0].requires_grad_()
    expected, found = loss_of(*clean, mask=mask_of()), loss_of(*dirty, mask=mask_of())
    assert vars(found) == vars(expected)
    expected.total.backward()
    found.total.backward()
    assert torch.equal(dirty[0].grad, clean[0].grad)


@pytest.mark.parametrize("loss_of", [of_policy, of_values])
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (0, 0)])
def test_no_token_costs_nothing(loss_of, shape):
    leaf = torch.full(shape, NAN, requires_grad=True)
    nothing = torch.full(shape, NAN)
    loss = loss_of(leaf, nothing, nothing, mask=torch.zeros(shape, dtype=torch.bool))
    loss.total.backward()
    assert all(x.item() == 0.0 and x.shape == () for x in vars(loss).values())
    assert not leaf.grad.any()


def test_losses_keep_to_fp32():
    tensors = [x.float() for x in draws(3)]
    for loss in (of_policy(*tensors, mask=mask_of()), of_values(*tensors, mask=mask_of())):
        assert {x.dtype for x in vars(loss).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("loss_of", "names"),
    [
        (of_policy, ["logprobs", "old_logprobs", "advantages", "mask"]),
        (of_values, ["values", "old_values", "returns", "mask"]),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_tensor_that_would_broadcast_is_refused_by_name(loss_of, names, position):
    tensors = [*(torch.zeros(2, 3) for _ in range(3)), torch.ones(2, 3, dtype=torch.bool)]
    tensors[position] = tensors[position][:, :1]
    with pytest.raises(ValueError, match=rf"shapes differ: .*\b{names[position]} \(2, 1\)"):
        loss_of(*tensors[:3], mask=tensors[3])
