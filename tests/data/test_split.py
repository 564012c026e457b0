import tempfile
from pathlib import Path

import numpy as np
import pytest

from dschat_lora.algos import seeds
from dschat_lora.algos.seeds import permutation, stream_entropy
from dschat_lora.data import row_arrays
from dschat_lora.data.collect import RowSplit, repeats, split_rows
from dschat_lora.data.row_arrays import RowArrays, first_equals

SHARES = (0.2, 0.4, 0.4)
ARRAYS = RowArrays(Path(tempfile.gettempdir()))


@pytest.fixture(autouse=True, params=[3, 2**20])
def at_a_time(request, monkeypatch):
    """Rows of which there are copies in memory; with few of them arrays are in files."""
    monkeypatch.setattr(row_arrays, "SMALL", request.param)
    monkeypatch.setattr(row_arrays, "AT_A_TIME", request.param)
    monkeypatch.setattr(seeds, "SORTED_AT_ONCE", request.param)


def numbers_of(first, **options):
    """The rows of each part, by the first row of each one's group."""
    split = split_rows(np.asarray(first, np.int64), ARRAYS, **options)
    return RowSplit(*map(np.flatnonzero, split))


def split(phase, *, size=100, shares=SHARES, eval_ratio=0.1, seed=7, source=0):
    options = {"shares": shares, "phase": phase, "eval_ratio": eval_ratio}
    return numbers_of(np.arange(size), seed=seed, source=source, **options)


def test_phases_and_the_held_out_part_share_no_row_and_leave_none():
    parts = [split(phase) for phase in (1, 2, 3)]
    assert [len(part.train) for part in parts] == [18, 36, 36]
    for part in parts:
        np.testing.assert_array_equal(part.eval, parts[0].eval)
    everything = np.concatenate([parts[0].eval, *(part.train for part in parts)])
    assert sorted(everything) == list(range(100))


@pytest.mark.parametrize("size", [0, 1, 2, 7, 11, 23])
def test_no_row_is_lost_or_used_twice_when_shares_do_not_divide(size):
    parts = [split(phase, size=size, eval_ratio=0.0) for phase in (1, 2, 3)]
    assert sorted(np.concatenate([part.train for part in parts])) == list(range(size))


def test_without_shares_every_phase_uses_all_that_is_not_held_out():
    parts = [split(phase, shares=None) for phase in (1, 2, 3)]
    for part in parts:
        assert sorted([*part.train, *part.eval]) == list(range(100))
        assert len(part.eval) == 10


def test_the_split_is_random_and_its_own_for_each_seed_and_source():
    drawn = [split(1), split(1, seed=8), split(1, source=1)]
    sets = {tuple(part.train) for part in drawn} | {tuple(range(18))}
    assert len(sets) == 4
    assert tuple(split(1).train) == tuple(drawn[0].train) == tuple(sorted(drawn[0].train))


@pytest.mark.parametrize(
    ("size", "ratio", "held_out"),
    [(100, 0.0, 0), (1, 0.5, 0), (2, 0.05, 1), (10, 0.05, 1), (50, 0.05, 3), (2, 0.99, 1)],
)
def test_at_least_one_row_is_held_out_and_one_left(size, ratio, held_out):
    part = split(1, size=size, shares=None, eval_ratio=ratio)
    assert (len(part.eval), len(part.train)) == (held_out, size - held_out)


@pytest.mark.parametrize(
    ("weight", "counts"), [(1.0, {1: 10}), (2.0, {2: 10}), (0.5, {0: 5, 1: 5}), (2.3, {2: 7, 3: 3})]
)
def test_a_weight_is_how_often_rows_are_used_on_average(weight, counts):
    drawn = repeats(10, weight, seed=1, source=0)
    assert dict(zip(*map(list, np.unique(drawn, return_counts=True)), strict=True)) == counts


def test_which_rows_a_fraction_uses_depends_on_the_seed():
    drawn = {tuple(repeats(40, 0.5, seed=seed, source=0)) for seed in range(5)}
    assert len(drawn) == 5


def test_permutations_are_permutations_that_differ_by_key():
    orders = [permutation(50, "epoch", seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(50))
    assert len({tuple(order) for order in orders}) == 4
    assert permutation(0, "x").tolist() == []


def test_a_permutation_never_changes():
    # Written down once: a resumed run must find the order it left.
    assert permutation(8, "epoch", 1234, 0).tolist() == [7, 0, 2, 4, 1, 6, 3, 5]


def parts_of(groups, **changes):
    options = {"shares": None, "phase": 1, "eval_ratio": 0.25, "seed": 3, "source": 0}
    return numbers_of([groups.index(each) for each in groups], **(options | changes))


def test_rows_of_a_group_are_held_out_together():
    groups = [f"prompt {i // 3}" for i in range(24)]
    parts = parts_of(groups)
    assert len(parts.eval) == 6
    held = {groups[i] for i in parts.eval}
    assert not held & {groups[i] for i in parts.train}
    assert sorted([*parts.train, *parts.eval]) == list(range(24))


def slow_split(groups, *, shares, phase, eval_ratio, seed):
    """The rows in the order of their groups, the held-out ones first, cut at the borders."""
    names = list(dict.fromkeys(groups))
    drawn = [names[n] for n in permutation(len(names), "split", seed, 0)]
    held, wanted = [], max(1, int(eval_ratio * len(groups) + 0.5))
    for name in drawn:
        if sum(map(groups.count, [*held, name])) <= wanted:
            held.append(name)
    smallest = min(drawn, key=groups.count)
    if not held and groups.count(smallest) <= len(groups) // 2:
        held = [smallest]
    order = [*held, *(name for name in drawn if name not in held)]
    rows = [row for name in order for row, own in enumerate(groups) if own == name]
    first = sum(map(groups.count, held)) or wanted
    borders = [int(sum(shares[:n]) * len(rows[first:]) + 0.5) for n in (phase - 1, phase)]
    return sorted(rows[first:][slice(*borders)]), sorted(rows[:first])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("phase", [1, 2, 3])
def test_groups_are_split_as_by_a_slow_loop(seed, phase):
    groups = np.random.default_rng(seed).integers(0, (2, 9, 60)[seed % 3], 40).tolist()
    options = {"shares": SHARES, "phase": phase, "eval_ratio": 0.2, "seed": seed}
    parts = parts_of(groups, **options)
    assert tuple(part.tolist() for part in parts) == slow_split(groups, **options)


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


def test_much_is_permuted_as_if_sorted_at_once():
    for size in (1, 2, 3, 4, 100):
        draws = np.random.PCG64(stream_entropy("x", size)).random_raw(size)
        out = np.zeros(size, np.int64)
        assert permutation(size, "x", size, out=out) is out
        assert out.tolist() == np.argsort(draws).tolist()


def test_a_group_larger_than_the_share_is_held_out_if_it_leaves_half():
    parts = parts_of(["a"] * 4 + ["b"] * 4 + ["c"] * 4, eval_ratio=0.1)
    assert len(parts.eval) == 4


def test_a_group_of_nearly_all_rows_is_split():
    parts = parts_of(["a"] * 8, eval_ratio=0.25)
    assert (len(parts.eval), len(parts.train)) == (2, 6)
    parts = parts_of(["a"] * 9 + ["b"], eval_ratio=0.1)
    assert [len(parts.eval), len(parts.train)] == [1, 9]


def test_nothing_is_held_out_where_nothing_is_asked_for():
    assert len(parts_of(["a", "a", "b"], eval_ratio=0.0).eval) == 0


def test_a_large_group_is_not_held_out_while_others_fit():
    for seed in range(20):
        parts = parts_of(["large"] * 8 + list("abcdefghijkl"), eval_ratio=0.25, seed=seed)
        assert len(parts.eval) == 5
        assert not set(parts.eval) & set(range(8))
