"""Seeds and permutations as pure functions of a key, so that no generator state is saved."""

import hashlib

import numpy as np
from numpy.typing import NDArray

SORTED_AT_ONCE = 2**21  # places of a permutation, about


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


def permutation(
    size: int, *key: int | str, out: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """A random order of ``range(size)``, the same for the same key on every machine.

    ``key`` says what the order is for, such as ``("epoch", seed, 3)``. Sorting raw generator
    output, rather than calling a shuffle, keeps the order across versions of numpy: only bit
    streams are promised to stay. Much of it is sorted a share at a time, by the first bits; with
    ``out`` (size,), where it is written, no other array grows with ``size``.
    """
    order = np.empty(size, np.int64) if out is None else out
    shares = (size // SORTED_AT_ONCE).bit_length()  # in bits
    filled = 0
    for share in range(1 << shares):
        drawn, places = [], []
        generator = np.random.PCG64(stream_entropy(*key))
        for start in range(0, size, SORTED_AT_ONCE):
            draws = generator.random_raw(min(SORTED_AT_ONCE, size - start))
            # A shift by all 64 bits is not defined.
            own = np.flatnonzero(draws >> np.uint64(63 - shares) >> np.uint64(1) == share)
            drawn.append(draws[own])
            places.append(own + start)
        if drawn:
            sorting = np.argsort(np.concatenate(drawn), kind="stable")
            order[filled : filled + len(sorting)] = np.concatenate(places)[sorting]
            filled += len(sorting)
    return order
