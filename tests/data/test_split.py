import numpy as np
import pytest

from dschat_lora.data.order import permutation
from dschat_lora.data.split import repeats, split_rows

SHARES = (0.2, 0.4, 0.4)


def split(phase, *, size=100, shares=SHARES, eval_ratio=0.1, seed=7, source=0):
    return split_rows(
        size, shares=shares, phase=phase, eval_ratio=eval_ratio, seed=seed, source=source
    )


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
