"""Random orders that are pure functions of what they are for."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A random order of ``range(size)``, the same for the same key on every machine.

    Sorting raw generator output, rather than calling a shuffle, keeps the order across
    versions of numpy: only bit streams are promised to stay.

    Args:
        size: number of items.
        key: what the order is for, such as ``("epoch", seed, 3)``.
    """
    entropy = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    draws = np.random.PCG64(int.from_bytes(entropy, "little")).random_raw(size)
    return np.argsort(draws, kind="stable")
