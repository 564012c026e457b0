"""Losses of policy and critic against loops over single tokens, and their clips by hand."""

import math

import pytest
import torch

from dschat_lora.algos.ppo import (
    cispo_loss,
    gspo_loss,
    loss_divisor,
    policy_loss,
    token_weights,
    value_loss,
)

NAN, INF = math.nan, math.inf
LENGTHS, WIDTH = [3, 0, 5, 1, 4], 6
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


def draws(number, scale=0.5, seed=0, padding=NAN):
    """fp64 tensors of a batch with junk in the padding."""
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(number, *MASK.shape, generator=generator, dtype=torch.float64)
    return list(torch.where(MASK, values, padding))


def rows_of(*tensors):
    """The tokens of each response that has some, as lists of tuples of leaf-like scalars."""
    for row, length in enumerate(LENGTHS):
        if length:
            yield [tuple(tensor[row, t] for tensor in tensors) for t in range(length)]


def objective(kind, p, ratio, a, *, cliprange, cliprange_high=None, dual_clip=0.0):
    """What is to grow of a token, and whether a bound holds it."""
    high = cliprange if cliprange_high is None else cliprange_high
    bounded = min(max(ratio.item(), 1 - cliprange), 1 + high)
    if kind is cispo_loss:
        return bounded * a * p, bounded != ratio.item()
    held = bool(a * bounded < a * ratio)
    value = a * bounded if held else a * ratio
    if dual_clip and a < 0 and value < dual_clip * a:
        return dual_clip * a, True
    return value, held


CASES = {
    "ppo": (policy_loss, {"cliprange": 0.2}),
    "clip higher": (policy_loss, {"cliprange": 0.1, "cliprange_high": 0.4}),
    "dual clip": (policy_loss, {"cliprange": 0.1, "cliprange_high": 0.4, "dual_clip": 1.3}),
    "gspo": (gspo_loss, {"cliprange": 0.05, "cliprange_high": 0.1}),
    "gspo, dual clip": (gspo_loss, {"cliprange": 0.05, "cliprange_high": 0.1, "dual_clip": 1.1}),
    "cispo": (cispo_loss, {"cliprange": 0.4, "cliprange_high": 0.2}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_figures_are_those_of_the_loop(name):
    kind, options = CASES[name]
    new, old, advantages = draws(3, scale=0.7, seed=3)
    if kind is gspo_loss:  # which has one for a response
        advantages = torch.where(MASK, advantages[:, :1].nan_to_num(), NAN)
    leaves = [each.requires_grad_() for each in (new, old, advantages)]
    loss = kind(*leaves, MASK, **options)
    total, clipped, kl, error, dual_acts = 0.0 * new[0, 0], 0, 0.0, 0.0, 0
    for tokens in rows_of(new, old.detach(), advantages.detach()):
        mean = sum(p - q for p, q, _ in tokens) / len(tokens)
        for p, q, a in tokens:
            own = torch.exp(p - q)
            ratio = torch.exp(mean) if kind is gspo_loss else own
            value, held = objective(kind, p, ratio, a, **options)
            total, clipped, kl = total - value, clipped + held, kl + (own - 1 - (p - q)).item()
            error = max(error, abs(own.item() - 1))
            dual_acts += bool(a < 0 and ratio > options.get("dual_clip", INF))
    figures = [loss.total, loss.clipped, loss.approx_kl, loss.ratio_error]
    expected = pytest.approx([total.item(), clipped, kl, error], abs=1e-10)
    assert [each.item() for each in figures] == expected
    assert all(each.shape == () and each.dtype == torch.float64 for each in figures)
    assert not any(each.requires_grad for each in figures[1:])
    assert 0 < clipped < sum(LENGTHS)
    assert (dual_acts > 0) == ("dual_clip" in options)
    (slope,) = torch.autograd.grad(total, new)
    loss.total.backward()
    torch.testing.assert_close(new.grad, torch.where(MASK, slope, 0), atol=1e-10, rtol=0)
    assert old.grad is advantages.grad is None


def one(*values):
    return [torch.tensor([[value]], dtype=torch.float64) for value in values]


TRUE = torch.tensor([[True]])


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
        *("gain capped", "gain free to recover", "harm never capped", "harm capped"),
        *("gain within", "harm within", "nothing to gain"),
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


def test_gspo_weighed_by_sequence_is_equation_5_of_its_paper():
    new, old, _ = draws(3, scale=0.4, seed=5)
    advantages = torch.tensor([1.0, 9.0, -2.0, 0.5, -1.0], dtype=torch.float64)
    weights = token_weights(MASK, "sequence", max_length=1, dtype=torch.float64)
    loss = gspo_loss(new, old, weights * advantages[:, None], MASK, cliprange=0.1)
    values = []
    for n, length in enumerate(LENGTHS):
        if length:
            ratio = math.exp(sum((new - old)[n, :length].tolist()) / length)
            a = advantages[n].item()
            values.append(min(ratio * a, min(max(ratio, 0.9), 1.1) * a))
    objective = -loss.total.item() / loss_divisor(LENGTHS, "sequence")
    assert objective == pytest.approx(sum(values) / len(values), abs=1e-10)


def test_cispo_keeps_the_gradient_of_every_token():
    new, old, advantages = draws(3, seed=7)
    cispo_loss(new.requires_grad_(), old, advantages, MASK, cliprange=0.4).total.backward()
    assert (new.grad[MASK] != 0).all()


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
    mean = total / loss_divisor(LENGTHS, normalization)
    assert mean == pytest.approx(expected(rows), abs=1e-10)


# ---------------------------------------------------------------------------- values


def test_value_loss_and_gradient_are_those_of_the_loop():
    leaves = [each.requires_grad_() for each in draws(3, seed=1)]
    loss = value_loss(*leaves, MASK, cliprange_value=0.2)
    total, clipped = 0.0 * leaves[0][0, 0], 0
    for tokens in rows_of(leaves[0], *(each.detach() for each in leaves[1:])):
        for value, old, target in tokens:
            near = torch.minimum(torch.maximum(value, old - 0.2), old + 0.2)
            total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
            clipped += bool((near - target) ** 2 > (value - target) ** 2)
    assert 0 < clipped < sum(LENGTHS)
    figures = [loss.total.item(), loss.clipped.item()]
    assert figures == pytest.approx([total.item(), clipped], abs=1e-10)
    (slope,) = torch.autograd.grad(total, leaves[0])
    loss.total.backward()
    torch.testing.assert_close(leaves[0].grad, torch.where(MASK, slope, 0), atol=1e-10, rtol=0)
    assert leaves[1].grad is leaves[2].grad is None
    assert not loss.clipped.requires_grad


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


def test_a_value_within_the_clip_does_not_count_as_clipped_for_a_rounding():
    generator = torch.Generator().manual_seed(2)
    old, returns = torch.randn(2, 1, 500, generator=generator)
    values = old + 0.1 * torch.rand(1, 500, generator=generator)
    everywhere = torch.ones(1, 500, dtype=torch.bool)
    assert value_loss(values, old, returns, everywhere, cliprange_value=0.2).clipped == 0


# ---------------------------------------------------------------------------- all of them

OF_POLICY = ["logprobs", "old_logprobs", "advantages", "mask"]
LOSSES = {
    "ppo": (policy_loss, {"cliprange": 0.2}, OF_POLICY),
    "gspo": (gspo_loss, {"cliprange": 0.2}, OF_POLICY),
    "cispo": (cispo_loss, {"cliprange": 0.2}, OF_POLICY),
    "values": (value_loss, {"cliprange_value": 0.2}, ["values", "old_values", "returns", "mask"]),
}
each_loss = pytest.mark.parametrize(("loss_of", "options", "names"), LOSSES.values(), ids=LOSSES)


@each_loss
@pytest.mark.parametrize("junk", [INF, -INF, 1e300])
def test_padding_may_hold_anything_and_losses_keep_to_fp32(loss_of, options, names, junk):
    results = []
    for padding in (0.0, junk):
        tensors = [each.float() for each in draws(3, padding=padding)]
        loss = loss_of(tensors[0].requires_grad_(), *tensors[1:], MASK, **options)
        loss.total.backward()
        results.append([*vars(loss).values(), tensors[0].grad])
    assert all(map(torch.equal, *results))
    assert {each.dtype for each in results[0]} == {torch.float32}


@each_loss
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3), (0, 0)])
def test_no_token_costs_nothing(loss_of, options, names, shape):
    leaf, nothing = torch.full(shape, NAN, requires_grad=True), torch.full(shape, NAN)
    loss = loss_of(leaf, nothing, nothing, torch.zeros(shape, dtype=torch.bool), **options)
    loss.total.backward()
    assert all(x.item() == 0.0 and x.shape == () for x in vars(loss).values())
    assert not leaf.grad.any()


@each_loss
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_tensor_that_would_broadcast_is_refused_by_name(loss_of, options, names, position):
    tensors = [*(torch.zeros(2, 3) for _ in range(3)), torch.ones(2, 3, dtype=torch.bool)]
    tensors[position] = tensors[position][:, :1]
    with pytest.raises(ValueError, match=rf"shapes differ: .*\b{names[position]} \(2, 1\)"):
        loss_of(*tensors, **options)
