"""Accuracy, calibration and correlation of scores by hand and against numpy."""

import math

import numpy as np
import pytest
import torch

from dschat_lora.algos.preference import accuracy, correlation, reliability


def logit(p):
    return math.log(p / (1 - p))


def test_a_tie_is_half_right():
    right = accuracy(torch.tensor([2.0, 1.0, 1.0, -3.0]), torch.tensor([1.0, 2.0, 1.0, -3.5]))
    assert right.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert right.dtype == torch.float32


def test_reliability_of_a_few_pairs_by_hand():
    # Said to win with 0.62 twice (right once) and with 0.9 once (right), two bins wide 0.25.
    differences = torch.tensor([logit(0.62), -logit(0.62), logit(0.9)], dtype=torch.float64)
    calibration = reliability(differences, num_bins=2)
    assert calibration.counts == [2, 1]
    assert calibration.predicted == pytest.approx([0.62, 0.9])
    assert calibration.observed == pytest.approx([0.5, 1.0])
    assert calibration.error == pytest.approx((2 * 0.12 + 1 * 0.1) / 3)


def test_bins_without_pairs_have_a_count_and_no_means():
    calibration = reliability(torch.tensor([logit(0.97), logit(0.52)]))
    assert calibration.counts == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert calibration.predicted == pytest.approx([0.52, 0.97])
    assert calibration.observed == [1.0, 1.0]


def test_a_tie_is_a_prediction_of_one_half_that_came_half_true():
    calibration = reliability(torch.zeros(4))
    assert calibration.counts == [4, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert (calibration.predicted, calibration.observed, calibration.error) == ([0.5], [0.5], 0.0)


def test_certainty_belongs_to_the_last_bin():
    calibration = reliability(torch.tensor([1e4, -1e4]))
    assert calibration.counts[-1] == 2
    assert calibration.error == pytest.approx(0.5)


def test_no_pair_has_no_error():
    calibration = reliability(torch.zeros(0))
    assert (calibration.error, sum(calibration.counts), calibration.predicted) == (0.0, 0, [])


def test_errors_of_random_pairs_are_those_of_a_slow_loop():
    differences = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    bins = [[] for _ in range(10)]
    for value in differences.tolist():
        p = 1 / (1 + math.exp(-abs(value)))
        bins[min(9, int((p - 0.5) * 20))].append((p, value > 0))
    gaps = [abs(sum(p - won for p, won in each)) for each in bins]
    calibration = reliability(differences)
    assert calibration.counts == [len(each) for each in bins]
    assert calibration.error == pytest.approx(sum(gaps) / 500)


def test_correlation_is_numpys_and_none_of_a_constant():
    rng = np.random.default_rng(0)
    left = rng.normal(size=40) + 100
    right = 0.3 * left + rng.normal(size=40)
    expected = np.corrcoef(left, right)[0, 1]
    ours = correlation(torch.from_numpy(left), torch.from_numpy(right))
    assert ours == pytest.approx(expected)
    assert correlation(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 3.0])) == pytest.approx(-1.0)
    assert correlation(torch.ones(3), torch.arange(3.0)) is None
    assert correlation(torch.zeros(0), torch.zeros(0)) is None
    assert correlation(torch.ones(1), torch.ones(1)) is None
