"""Every variant of DPO's loss by hand."""

import math

import pytest
import torch

from dschat_lora.algos.dpo import dpo_loss

LOG3 = math.log(3)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def loss_of(difference, **options):
    """Of a pair whose chosen answer became likelier by ``difference`` more nats."""
    return dpo_loss(tensor(0.7 + difference), tensor(0.7), **options).item()


@pytest.mark.parametrize(
    ("difference", "beta", "expected"),
    [
        (0.0, 0.1, math.log(2)),
        (LOG3 / 0.1, 0.1, math.log(4 / 3)),  # three times as likely to be the better one
        (-LOG3 / 0.1, 0.1, math.log(4)),
        (LOG3 / 2, 2.0, math.log(4 / 3)),
        (1e5, 0.1, 0.0),
        (-1e5, 0.1, 1e4),
    ],
    ids=["as the reference", "right", "wrong", "larger beta", "sure and right", "sure and wrong"],
)
def test_sigmoid_is_the_surprise_at_the_better_answer_winning(difference, beta, expected):
    assert loss_of(difference, beta=beta) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("difference", "expected"),
    [(0.0, 1.0), (5.0, 0.5), (-5.0, 1.5), (10.0, 0.0), (20.0, 0.0)],
)
def test_hinge_wants_a_lead_of_one_over_beta_and_no_more(difference, expected):
    assert loss_of(difference, beta=0.1, loss_type="hinge") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("difference", "beta", "expected"),
    [(5.0, 0.1, 0.0), (0.0, 0.1, 25.0), (7.0, 0.1, 4.0), (3.0, 0.1, 4.0), (0.0, 0.5, 1.0)],
)
def test_ipo_wants_a_lead_of_half_one_over_beta_exactly(difference, beta, expected):
    assert loss_of(difference, beta=beta, loss_type="ipo") == pytest.approx(expected)


def test_smoothing_mixes_the_surprises_of_a_right_and_of_a_wrong_label():
    right, wrong = math.log(4 / 3), math.log(4)
    loss = loss_of(LOG3, beta=1.0, label_smoothing=0.25)
    assert loss == pytest.approx(0.75 * right + 0.25 * wrong)
    assert loss_of(-LOG3, beta=1.0, label_smoothing=0.25) == pytest.approx(
        0.75 * wrong + 0.25 * right
    )


def test_smoothed_loss_is_least_where_the_better_answer_wins_as_often_as_labels_are_right():
    # sigmoid(beta d) = 0.8 at the optimum for a fifth of wrong labels
    chosen = tensor(math.log(4) / 0.5)
    dpo_loss(chosen, tensor(0.0), beta=0.5, label_smoothing=0.2).backward()
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, -2.0 * 0.25),
        ({"loss_type": "hinge"}, -2.0),
        ({"loss_type": "ipo"}, 2 * (LOG3 / 2 - 0.25)),
        ({"label_smoothing": 0.1}, -2.0 * (0.9 - 0.75)),
    ],
    ids=["sigmoid", "hinge", "ipo", "smoothed"],
)
def test_gradient_of_the_two_answers_is_equal_and_opposite(options, expected):
    chosen, rejected = tensor(LOG3 / 2, 0.0), tensor(0.0, 1.0)
    if options.get("loss_type") == "hinge":
        chosen = tensor(0.3, 0.0)
    dpo_loss(chosen, rejected, beta=2.0, **options)[0].backward()
    assert chosen.grad.tolist() == pytest.approx([expected, 0.0])
    assert rejected.grad.tolist() == pytest.approx([-expected, 0.0])


def test_one_value_comes_back_for_each_pair():
    losses = dpo_loss(tensor(0.0, LOG3), tensor(0.0, 0.0), beta=1.0)
    assert losses.tolist() == pytest.approx([math.log(2), math.log(4 / 3)])


@pytest.mark.parametrize("loss_type", ["ipo", "hinge"])
def test_smoothing_of_another_loss_is_refused(loss_type):
    with pytest.raises(ValueError, match=f"for the sigmoid loss, not {loss_type}"):
        loss_of(0.0, beta=0.1, loss_type=loss_type, label_smoothing=0.1)


def test_answers_without_a_partner_are_refused():
    with pytest.raises(ValueError, match=r"log-ratios have shapes \(2,\) and \(1,\)"):
        dpo_loss(torch.zeros(2), torch.zeros(1), beta=0.1)
