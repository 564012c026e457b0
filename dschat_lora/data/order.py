"""Random orders that are pure functions of what they are for."""

import numpy as np
from numpy.typing import NDArray

from dschat_lora.randomness import stream_entropy


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A random order of ``range(size)``, the same for the same key on every machine.

    Sorting raw generator output, rather than calling a shuffle, keeps the order across
    versions of numpy: only bit streams are promised to stay.

    Args:
        size: number of items.
        key: what the order is for, such as ``("epoch", seed, 3)``.
    """
    draws = np.random.PCG64(stream_entropy(*key)).random_raw(size)
    return np.argsort(draws, kind="stable")
