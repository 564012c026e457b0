"""Seeds and permutations as pure functions of a key, so that no generator state is saved."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def stream_entropy(*key: int | str, size: int = 16) -> int:
    """``8 * size`` random bits that depend on ``key`` alone, the same on every machine.

    ``key`` is the stream's name, the run's seed, and the place in the run, such as
    ``("dropout", seed, step, rank)``.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")


def stream_seed(*key: int | str) -> int:
    """A seed in [0, 2**63), which every generator accepts, from :func:`stream_entropy`."""
    return stream_entropy(*key, size=8) >> 1


def permutation(size: int, *key: int | str) -> NDArray[np.int64]:
    """A random order of ``range(size)``, the same for the same key on every machine.

    ``key`` says what the order is for, such as ``("epoch", seed, 3)``. Sorting raw generator
    output, rather than calling a shuffle, keeps the order across versions of numpy: only bit
    streams are promised to stay.
    """
    draws = np.random.PCG64(stream_entropy(*key)).random_raw(size)
    return np.argsort(draws, kind="stable")
