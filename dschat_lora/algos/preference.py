"""Preference accuracy, calibration (reliability) and correlation of scores."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 10


@dataclass(frozen=True)
class Reliability:
    """Predicted against observed preference, in bins of equal width.

    ``error`` is the mean of |predicted - observed| over the pairs, in [0, 1] (expected calibration
    error, arXiv:1706.04599).
    """

    error: float
    counts: list[int]  # pairs in each bin
    predicted: list[float]  # mean predicted probability in each bin that has pairs
    observed: list[float]  # share of its predictions that came true


def accuracy(chosen_scores: Tensor, rejected_scores: Tensor, *, tolerance: float = 0.0) -> Tensor:
    """(P,) 1 where the better answer scores higher, 1/2 where both score the same, else 0.

    Scores that differ by no more than ``tolerance`` are the same.
    """
    difference = chosen_scores - rejected_scores
    return (difference > tolerance).float() + 0.5 * (difference.abs() <= tolerance).float()


def reliability(differences: Tensor, *, num_bins: int = NUM_BINS) -> Reliability:
    """Calibration of predicted preferences: predicted against observed win rates.

    ``differences`` are (P,) chosen minus rejected score. The predicted winner has
    ``p = sigmoid(|s_c - s_r|)``, in [0.5, 1], which the bins are over; it won where the difference
    is positive. A tie counts as half a win.
    """
    differences = differences.double()
    predicted = torch.sigmoid(differences.abs())
    won = accuracy(differences, torch.zeros_like(differences)).double()
    index = ((predicted - 0.5) * 2 * num_bins).long().clamp(0, num_bins - 1)
    counts = torch.bincount(index, minlength=num_bins)
    sums = torch.zeros(2, num_bins, dtype=torch.float64)
    sums[0].index_add_(0, index, predicted)
    sums[1].index_add_(0, index, won)
    full = counts > 0
    means = sums[:, full] / counts[full]
    gaps = (means[0] - means[1]).abs() * counts[full] / max(1, len(differences))
    return Reliability(float(gaps.sum()), counts.tolist(), means[0].tolist(), means[1].tolist())


def correlation(left: Tensor, right: Tensor) -> float | None:
    """Pearson's correlation of two (N,) tensors, in [-1, 1]; None where one is constant."""
    left, right = (x.double() - x.double().mean() for x in (left, right))
    spread = float(left.norm() * right.norm())
    return float(left @ right) / spread if spread > 0 else None
