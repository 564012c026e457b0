import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dschat_lora.algos import seeds
from dschat_lora.algos.seeds import permutation, stream_entropy
from dschat_lora.data import row_arrays
from dschat_lora.data.collect import repeats, split_rows
from dschat_lora.data.row_arrays import RowArrays, first_equals
from helpers.drawing import drawing

ARRAYS = RowArrays(Path(tempfile.gettempdir()))


def few_at_a_time(size):
    """Rows of which there are copies in memory; with few of them arrays are in files."""
    return (
        mock.patch.object(row_arrays, "SMALL", size),
        mock.patch.object(row_arrays, "AT_A_TIME", size),
        mock.patch.object(seeds, "SORTED_AT_ONCE", size),
    )


@pytest.fixture(params=[3, 2**20])
def at_a_time(request):
    patches = few_at_a_time(request.param)
    with patches[0], patches[1], patches[2]:
        yield


def split(groups, **options):
    """The rows to train on and the held-out ones, by the names of their groups."""
    first = np.array([groups.index(each) for each in groups], np.int64)
    parts = split_rows(first, ARRAYS, source=0, **options)
    return tuple(np.flatnonzero(part).tolist() for part in parts)


def slow_split(groups, *, shares, phase, eval_ratio, seed):
    """The rows in the order of their groups, the held-out ones first, cut at the borders."""
    names = list(dict.fromkeys(groups))
    drawn = [names[n] for n in permutation(len(names), "split", seed, 0)]
    held, wanted = [], 0
    if eval_ratio and len(groups) > 1:  # one row at least is held out, and one left
        wanted = min(max(1, int(eval_ratio * len(groups) + 0.5)), len(groups) - 1)
    for name in drawn:
        if sum(map(groups.count, [*held, name])) <= wanted:
            held.append(name)
    smallest = min(drawn, key=groups.count, default=None)
    if wanted and not held and groups.count(smallest) <= len(groups) // 2:
        held = [smallest]
    order = [*held, *(name for name in drawn if name not in held)]
    rows = [row for name in order for row, own in enumerate(groups) if own == name]
    first = sum(map(groups.count, held)) or wanted
    rest, held_out = rows[first:], sorted(rows[:first])
    if shares is None:
        return sorted(rest), held_out
    borders = [int(sum(shares[:n]) * len(rest) + 0.5) for n in (phase - 1, phase)]
    return sorted(rest[slice(*borders)]), held_out


@drawing(100)
@given(
    groups=st.sampled_from([0, 2, 9, 60]).flatmap(
        lambda most: st.lists(st.integers(0, most), max_size=40)
    ),
    shares=st.sampled_from([None, (0.2, 0.4, 0.4), (0.0, 0.5, 0.5)]),
    eval_ratio=st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.99]),
    seed=st.integers(0, 99),
    size=st.sampled_from([3, 2**20]),
)
@example(groups=[0] * 8, shares=None, eval_ratio=0.25, seed=3, size=3)  # one that is cut
@example(groups=[0] * 4 + [1] * 4 + [2] * 4, shares=None, eval_ratio=0.1, seed=3, size=3)
@example(groups=[0] * 8 + [*range(1, 13)], shares=None, eval_ratio=0.25, seed=3, size=3)
def test_groups_are_split_as_by_a_slow_loop(groups, shares, eval_ratio, seed, size):
    patches = few_at_a_time(size)
    everything = Counter()
    with patches[0], patches[1], patches[2]:
        for phase in (1, 2, 3):
            options = {"shares": shares, "phase": phase, "eval_ratio": eval_ratio, "seed": seed}
            trained, held_out = split(groups, **options)
            assert (trained, held_out) == slow_split(groups, **options)
            everything.update(trained)
    everything.update(held_out)
    # No row is lost or of two phases, however the shares divide them.
    uses = {row: 3 if shares is None and row not in held_out else 1 for row in range(len(groups))}
    assert everything == uses


def test_the_split_is_random_and_its_own_for_each_seed_and_source():
    options = {"shares": (0.2, 0.4, 0.4), "phase": 1, "eval_ratio": 0.1}
    trained = [
        split_rows(np.arange(100), ARRAYS, seed=seed, source=source, **options).train
        for seed, source in ((7, 0), (8, 0), (7, 1), (7, 0))
    ]
    assert {int(rows.sum()) for rows in trained} == {18}
    assert len({rows.tobytes() for rows in trained} | {(np.arange(100) < 18).tobytes()}) == 4


@pytest.mark.parametrize(
    ("weight", "counts"), [(1.0, {1: 10}), (2.0, {2: 10}), (0.5, {0: 5, 1: 5}), (2.3, {2: 7, 3: 3})]
)
def test_a_weight_is_how_often_rows_are_used_on_average(weight, counts):
    assert Counter(repeats(10, weight, seed=1, source=0).tolist()) == counts
    drawn = {repeats(40, weight + 0.5, seed=seed, source=0).tobytes() for seed in range(5)}
    assert len(drawn) == (5 if weight != 0.5 else 1)


@pytest.mark.usefixtures("at_a_time")
def test_permutations_differ_by_key_and_never_change():
    orders = [permutation(50, "epoch", seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(50))
    assert len({tuple(order) for order in orders}) == 4
    # Written down once: a resumed run must find the order it left.
    assert permutation(8, "epoch", 1234, 0).tolist() == [7, 0, 2, 4, 1, 6, 3, 5]
    for size in (0, 1, 2, 3, 4, 100):
        draws = np.random.PCG64(stream_entropy("x", size)).random_raw(size)
        out = np.zeros(size, np.int64)
        assert permutation(size, "x", size, out=out) is out
        assert out.tolist() == np.argsort(draws).tolist()


@pytest.mark.usefixtures("at_a_time")
@pytest.mark.parametrize(("rows", "distinct"), [(0, 1), (1, 1), (12, 4), (300, 90)])
def test_the_first_equal_digest_is_found(rows, distinct):
    drawn = np.random.default_rng(rows)
    values = drawn.integers(0, 2**64, (distinct, 2), dtype=np.uint64)
    values[:, 0] = values[drawn.integers(0, distinct, distinct), 0]  # half of a digest is not all
    values[0] = 0
    digests = values[drawn.integers(0, distinct, rows)]
    seen, first = {}, []
    for row, digest in enumerate(map(bytes, digests)):
        first.append(seen.setdefault(digest, row) if any(digest) else row)
    assert first_equals(digests, ARRAYS).tolist() == first
