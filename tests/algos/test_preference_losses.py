"""DPO's, ORPO's and SimPO's losses by hand."""

import math

import pytest
import torch

from dschat_lora.algos.dpo import dpo_loss
from dschat_lora.algos.reference_free import odds_ratio_loss, simpo_loss

LOG2, LOG3 = math.log(2), math.log(3)
RIGHT, WRONG = math.log(4 / 3), math.log(4)  # surprise at what had the odds 3 : 1 and 1 : 3


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


HINGE, IPO = {"loss_type": "hinge"}, {"loss_type": "ipo"}


@pytest.mark.parametrize(
    ("difference", "beta", "options", "expected"),
    [
        (0.0, 0.1, {}, LOG2),
        (LOG3 / 0.1, 0.1, {}, RIGHT),
        (-LOG3 / 0.1, 0.1, {}, WRONG),
        (LOG3 / 2, 2.0, {}, RIGHT),
        (1e5, 0.1, {}, 0.0),
        (-1e5, 0.1, {}, 1e4),
        (LOG3, 1.0, {"label_smoothing": 0.25}, 0.75 * RIGHT + 0.25 * WRONG),
        (-LOG3, 1.0, {"label_smoothing": 0.25}, 0.75 * WRONG + 0.25 * RIGHT),
        # A lead of 1 / beta is enough.
        *((d, 0.1, HINGE, x) for d, x in ((0.0, 1.0), (5.0, 0.5), (-5.0, 1.5), (10.0, 0.0))),
        (20.0, 0.1, HINGE, 0.0),
        # Half of it is wanted exactly.
        *((d, 0.1, IPO, x) for d, x in ((5.0, 0.0), (0.0, 25.0), (7.0, 4.0), (3.0, 4.0))),
        (0.0, 0.5, IPO, 1.0),
    ],
)
def test_dpo_is_the_surprise_at_the_better_answer_winning_or_what_it_lacks_of_a_lead(
    difference, beta, options, expected
):
    """Of a pair whose chosen answer became likelier by ``difference`` more nats, beside another."""
    losses = dpo_loss(tensor(0.7 + difference, 1.0), tensor(0.7, 1.0), beta=beta, **options)
    assert losses.shape == (2,)
    assert losses[0].item() == pytest.approx(expected, abs=1e-9)


def test_smoothed_loss_is_least_where_the_better_answer_wins_as_often_as_labels_are_right():
    # sigmoid(beta d) = 0.8 at the optimum for a fifth of wrong labels
    chosen = tensor(math.log(4) / 0.5)
    dpo_loss(chosen, tensor(0.0), beta=0.5, label_smoothing=0.2).backward()
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "difference", "expected"),
    [
        ({}, LOG3 / 2, -2.0 * 0.25),
        (HINGE, 0.3, -2.0),
        (IPO, LOG3 / 2, 2 * (LOG3 / 2 - 0.25)),
        ({"label_smoothing": 0.1}, LOG3 / 2, -2.0 * (0.9 - 0.75)),
    ],
    ids=["sigmoid", "hinge", "ipo", "smoothed"],
)
def test_gradient_of_the_two_answers_is_equal_and_opposite(options, difference, expected):
    chosen, rejected = tensor(difference, 0.0), tensor(0.0, 1.0)
    dpo_loss(chosen, rejected, beta=2.0, **options)[0].backward()
    assert chosen.grad.tolist() == pytest.approx([expected, 0.0])
    assert rejected.grad.tolist() == pytest.approx([-expected, 0.0])


# ---------------------------------------------------------------------------- ORPO and SimPO


@pytest.mark.parametrize(
    ("chosen", "rejected", "ratio"),
    [(0.5, 0.5, 1.0), (0.75, 0.5, 3.0), (0.5, 0.75, 1 / 3), (0.9, 0.25, 27.0), (0.01, 0.2, 4 / 99)],
)
def test_odds_ratio_loss_is_the_surprise_at_the_larger_odds_winning(chosen, rejected, ratio):
    both = tensor(math.log(chosen)), tensor(math.log(rejected))
    losses, log_odds = odds_ratio_loss(*both)
    assert log_odds.item() == pytest.approx(math.log(ratio))
    assert losses.item() == pytest.approx(math.log((1 + ratio) / ratio))
    losses.backward()
    # d log(p / (1 - p)) / d log p = 1 / (1 - p), times the chance of the wrong order
    slopes = [-1 / (1 - chosen) / (1 + ratio), 1 / (1 - rejected) / (1 + ratio)]
    assert [each.grad.item() for each in both] == pytest.approx(slopes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_odds_of_answers_that_are_certain_or_hopeless_stay_finite(dtype):
    chosen = torch.tensor([0.0, -1e4, -1e-9], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-1e4, 0.0, -0.5], dtype=dtype, requires_grad=True)
    losses, log_odds = odds_ratio_loss(chosen, rejected)
    losses.sum().backward()
    assert all(x.isfinite().all() for x in (losses, log_odds, chosen.grad, rejected.grad))
    assert losses[0].item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("lead", "beta", "gamma", "smoothing", "expected"),
    [
        (0.0, 2.0, 0.0, 0.0, LOG2),
        (LOG3 / 2, 2.0, 0.0, 0.0, RIGHT),
        (0.0, 2.0, LOG3, 0.0, WRONG),  # equal, but a lead is wanted
        (LOG3, 2.0, LOG3, 0.0, RIGHT),
        (-LOG3, 1.0, 0.0, 0.0, WRONG),
        (LOG3, 2.0, LOG3, 0.25, 0.75 * RIGHT + 0.25 * WRONG),
    ],
)
def test_simpo_wants_a_lead_of_gamma_between_rewards_of_beta_times_the_means(
    lead, beta, gamma, smoothing, expected
):
    options = {"beta": beta, "gamma": gamma, "label_smoothing": smoothing}
    losses = simpo_loss(tensor(lead - 1.5), tensor(-1.5), **options)
    assert losses.tolist() == pytest.approx([expected])


def test_simpo_moves_both_answers_by_beta_times_the_chance_of_being_wrong():
    chosen, rejected = tensor(-1.0, -1.0), tensor(-1.0, -2.0)
    simpo_loss(chosen, rejected, beta=2.0, gamma=LOG3)[0].backward()
    assert chosen.grad.tolist() == pytest.approx([-2 * 0.75, 0.0])
    assert rejected.grad.tolist() == pytest.approx([2 * 0.75, 0.0])


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda a, b: dpo_loss(a, b, beta=0.1), r"log-ratios have shapes \(2,\) and \(1,\)"),
        (odds_ratio_loss, r"log-probabilities have shapes \(2,\) and \(1,\)"),
        (lambda a, b: simpo_loss(a, b, beta=2.0, gamma=0.5), r"have shapes \(2,\) and \(1,\)"),
        (
            lambda a, b: dpo_loss(a, a, beta=1.0, label_smoothing=0.1, **IPO),
            "sigmoid loss, not ipo",
        ),
        (lambda a, b: dpo_loss(a, a, beta=1.0, label_smoothing=0.1, **HINGE), "loss, not hinge"),
    ],
)
def test_answers_without_a_partner_and_smoothing_of_another_loss_are_refused(loss, words):
    with pytest.raises(ValueError, match=words):
        loss(torch.zeros(2), torch.zeros(1))
