"""ORPO's odds ratio and SimPO's loss by hand."""

import math

import pytest
import torch

from dschat_lora.algos.reference_free import odds_ratio_loss, simpo_loss

LOG3 = math.log(3)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("chosen", "rejected", "ratio"),
    [(0.5, 0.5, 1.0), (0.75, 0.5, 3.0), (0.5, 0.75, 1 / 3), (0.9, 0.25, 27.0), (0.01, 0.2, 4 / 99)],
)
def test_odds_ratio_loss_is_the_surprise_at_the_larger_odds_winning(chosen, rejected, ratio):
    losses, log_odds = odds_ratio_loss(tensor(math.log(chosen)), tensor(math.log(rejected)))
    assert log_odds.item() == pytest.approx(math.log(ratio))
    assert losses.item() == pytest.approx(math.log((1 + ratio) / ratio))


def test_gradient_of_the_odds_grows_with_the_probability():
    # d log(p / (1 - p)) / d log p = 1 / (1 - p), times the chance of the wrong order
    chosen, rejected = tensor(math.log(0.75)), tensor(math.log(0.5))
    odds_ratio_loss(chosen, rejected)[0].backward()
    assert chosen.grad.item() == pytest.approx(-0.25 * 4)
    assert rejected.grad.item() == pytest.approx(0.25 * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_answers_that_are_certain_or_hopeless_stay_finite(dtype):
    chosen = torch.tensor([0.0, -1e4, -1e-9], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-1e4, 0.0, -0.5], dtype=dtype, requires_grad=True)
    losses, log_odds = odds_ratio_loss(chosen, rejected)
    losses.sum().backward()
    for values in (losses, log_odds, chosen.grad, rejected.grad):
        assert values.isfinite().all()
    assert losses[0].item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("lead", "options", "expected"),
    [
        (0.0, {"beta": 2.0, "gamma": 0.0}, math.log(2)),
        (LOG3 / 2, {"beta": 2.0, "gamma": 0.0}, math.log(4 / 3)),
        (0.0, {"beta": 2.0, "gamma": LOG3}, math.log(4)),
        (LOG3, {"beta": 2.0, "gamma": LOG3}, math.log(4 / 3)),
        (-LOG3, {"beta": 1.0, "gamma": 0.0}, math.log(4)),
        (
            LOG3,
            {"beta": 2.0, "gamma": LOG3, "label_smoothing": 0.25},
            0.75 * math.log(4 / 3) + 0.25 * math.log(4),
        ),
    ],
    ids=["equal", "right", "equal, but a lead is wanted", "more than wanted", "wrong", "smoothed"],
)
def test_simpo_wants_a_lead_of_gamma_between_rewards_of_beta_times_the_means(
    lead, options, expected
):
    losses = simpo_loss(tensor(lead - 1.5), tensor(-1.5), **options)
    assert losses.tolist() == pytest.approx([expected])


def test_simpo_moves_both_answers_by_beta_times_the_chance_of_being_wrong():
    chosen, rejected = tensor(-1.0, -1.0), tensor(-1.0, -2.0)
    simpo_loss(chosen, rejected, beta=2.0, gamma=LOG3)[0].backward()
    assert chosen.grad.tolist() == pytest.approx([-2 * 0.75, 0.0])
    assert rejected.grad.tolist() == pytest.approx([2 * 0.75, 0.0])


def test_answers_without_a_partner_are_refused():
    for loss in (odds_ratio_loss, lambda *each: simpo_loss(*each, beta=2.0, gamma=0.5)):
        with pytest.raises(ValueError, match=r"log-probabilities have shapes \(2,\) and \(1,\)"):
            loss(torch.zeros(2), torch.zeros(1))
