"""KTO's loss and its estimate of the divergence by hand."""

import math

import pytest
import torch

from dschat_lora.addons.kto.loss import clamped_kl, kto_loss

LOG3 = math.log(3)
pytestmark = pytest.mark.smoke


GOOD, BAD = True, False


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def loss_of(logratio, label, kl=0.0, **options):
    kl = torch.tensor(kl, dtype=torch.float64)
    return kto_loss(tensor(logratio), torch.tensor([label]), kl, **options).item()


@pytest.mark.parametrize(
    ("logratio", "label", "kl", "beta", "expected"),
    [
        (0.0, GOOD, 0.0, 0.1, 1 / 2),
        (0.0, BAD, 0.0, 0.1, 1 / 2),
        (LOG3 / 0.1, GOOD, 0.0, 0.1, 1 / 4),
        (LOG3 / 0.1, BAD, 0.0, 0.1, 3 / 4),
        (-LOG3 / 2, GOOD, 0.0, 2.0, 3 / 4),
        (-LOG3 / 2, BAD, 0.0, 2.0, 1 / 4),
        (2.0 + LOG3, GOOD, 2.0, 1.0, 1 / 4),
        (2.0 + LOG3, BAD, 2.0, 1.0, 3 / 4),
        (1e5, GOOD, 0.0, 1.0, 0.0),
        (-1e5, BAD, 0.0, 1.0, 0.0),
        (-1e5, GOOD, 0.0, 1.0, 1.0),
    ],
)
def test_loss_is_how_far_an_answer_is_from_the_right_side_of_the_divergence(
    logratio, label, kl, beta, expected
):
    assert loss_of(logratio, label, kl, beta=beta) == pytest.approx(expected, abs=1e-12)


def test_weights_are_of_good_and_of_bad_answers():
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.25}
    assert loss_of(LOG3, GOOD, beta=1.0, **weights) == pytest.approx(1.5 / 4)
    assert loss_of(LOG3, BAD, beta=1.0, **weights) == pytest.approx(0.25 * 3 / 4)


def test_good_answers_become_likelier_and_the_divergence_gets_no_gradient():
    logratios, kl = tensor(LOG3, LOG3), tensor(0.0)
    losses = kto_loss(logratios, torch.tensor([GOOD, BAD]), kl[0], beta=2.0)
    losses.sum().backward()
    slope = 2.0 * 0.9 * 0.1  # of the sigmoid at log 9
    assert logratios.grad.tolist() == pytest.approx([-slope, slope])
    assert kl.grad is None


@pytest.mark.parametrize(
    ("total", "count", "expected"), [(6.0, 4.0, 1.5), (-6.0, 4.0, 0.0), (0.0, 0.0, 0.0)]
)
def test_divergence_is_the_mean_and_never_negative(total, count, expected):
    found = clamped_kl(torch.tensor(total, requires_grad=True), torch.tensor(count))
    assert found.item() == expected
    assert not found.requires_grad


def test_answers_without_a_label_are_refused():
    with pytest.raises(ValueError, match=r"log-ratios have shape \(2,\), labels \(1,\)"):
        kto_loss(torch.zeros(2), torch.tensor([True]), torch.tensor(0.0), beta=0.1)
