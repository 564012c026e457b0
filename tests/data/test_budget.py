"""Micro-batches of so many tokens: what they hold, and how evenly."""

import numpy as np
import pytest

from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import SampleCounts, StepLoader, TokenBudget
from dschat_lora.data.samples import SequenceSample

TOKENS, LONGEST = 400, 100
LENGTHS = np.minimum(LONGEST, np.random.default_rng(0).geometric(1 / 25, 500))
SHAPES = [(8, 1), (2, 4), (1, 8)]  # accumulation, world
LAYOUTS = [TOKENS, LONGEST, None]  # one row, several, one of each sample


def counts_of(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    return SampleCounts(lengths, lengths - 1, lengths * (lengths + 1) // 2, lengths, 0 * lengths)


class Samples:
    def __getitem__(self, index):
        ids = np.full(LENGTHS[index], 1 + index, dtype=np.int32)
        return SequenceSample.of(ids, ids)


def loaders(accumulation, world, row_tokens, *, seed=5):
    budget = TokenBudget(TOKENS, accumulation * world, row_tokens)
    groups = budget.groups(counts_of(LENGTHS), seed=seed)
    return [
        StepLoader(
            Samples(),
            rows=groups,
            micro_batch_size=1,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world,
            seed=seed,
            collate=SampleCollator(0),
            counts=counts_of(LENGTHS),
            budget=budget,
        )
        for rank in range(world)
    ]


def held(batch):
    """Numbers of the samples of a batch."""
    return sorted(set(batch.input_ids.flatten().tolist()) - {0})


def steps(accumulation, world, row_tokens, *, epoch=0, start_step=0, seed=5):
    """For each step, the micro-batches of every rank."""
    made = loaders(accumulation, world, row_tokens, seed=seed)
    return list(zip(*(loader.epoch(epoch, start_step) for loader in made), strict=True))


def sets(found):
    return [sorted(n for rank in step for batch in rank for n in held(batch)) for step in found]


@pytest.mark.parametrize("row_tokens", LAYOUTS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_every_sample_is_in_one_step_of_an_epoch(row_tokens, epoch):
    found = [n for step in sets(steps(2, 2, row_tokens, epoch=epoch)) for n in step]
    assert sorted(found) == list(range(1, 1 + len(LENGTHS)))


@pytest.mark.parametrize("row_tokens", LAYOUTS)
def test_a_step_is_the_same_however_its_micro_batches_are_shared_out(row_tokens):
    expected = sets(steps(*SHAPES[0], row_tokens))
    assert len(expected) > 3
    for shape in SHAPES[1:]:
        assert sets(steps(*shape, row_tokens)) == expected
    assert sets(steps(2, 4, row_tokens, start_step=2)) == expected[2:]
    assert sets(steps(2, 4, row_tokens, epoch=1)) != expected
    assert sets(steps(2, 4, row_tokens, seed=6)) != expected


@pytest.mark.parametrize("row_tokens", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_micro_batch_holds_more_than_the_budget(row_tokens, shape):
    found = steps(*shape, row_tokens)
    for step in found:
        assert len({len(window) for window in step}) == 1
        assert len(step[0]) <= shape[0]
        for window in step:
            assert max(batch.num_tokens for batch in window) <= TOKENS
            if row_tokens is None:
                assert max(batch.input_ids.numel() for batch in window) <= TOKENS
                assert all(len(batch.input_ids) == max(1, batch.num_samples) for batch in window)


def test_one_row_has_no_padding_and_several_have_little():
    for row_tokens, least in ((TOKENS, 1), (LONGEST, 0.95)):
        batches = [batch for step in steps(4, 2, row_tokens) for rank in step for batch in rank]
        positions = sum(batch.input_ids.numel() for batch in batches)
        assert sum(batch.num_tokens for batch in batches) >= least * positions
        rows = [len(batch.input_ids) for batch in batches]
        assert rows == [-(-batch.num_tokens // row_tokens) for batch in batches]


@pytest.mark.parametrize("row_tokens", LAYOUTS[:2])
def test_micro_batches_are_full_and_alike(row_tokens):
    *full, last = steps(4, 2, row_tokens)
    budget = TokenBudget(TOKENS, 8, row_tokens)
    groups = budget.groups(counts_of(LENGTHS), seed=5)
    assert budget.fill(groups, counts_of(LENGTHS)) > 0.97
    for step in full:
        tokens = [batch.num_tokens for window in step for batch in window]
        assert len(tokens) == 8
        assert max(tokens) < 1.03 * np.mean(tokens)
    # What is left at the end is shared out too.
    tokens = [batch.num_tokens for window in last for batch in window]
    assert max(tokens) - min(tokens) < LONGEST


def test_samples_are_spread_the_longest_first_by_hand():
    budget = TokenBudget(20, 2, 20)
    counts = counts_of([9, 8, 7, 6, 5, 4])
    # 9 | 8, then 7 to 8, 6 to 9, 5 where the first has 15 (number 0), 4 to the other.
    assert budget.assign_to_ranks([(0, 1), (2, 3, 4, 5)], counts, world_size=2) == [
        [(0, 3, 4)],
        [(1, 2, 5)],
    ]


def test_groups_stay_where_their_samples_fit_no_other_way():
    # The longest first: 5 | 5, 5 + 4, 5 + 3, then no room for the other 3.
    counts = counts_of([4, 3, 3, 5, 5])
    dealt = TokenBudget(10, 2, 10).assign_to_ranks([(0, 1, 2), (3, 4)], counts, world_size=1)
    assert dealt == [[(0, 1, 2)], [(3, 4)]]


def test_a_step_of_single_samples_takes_as_many_as_fit_sorted():
    # Two micro-batches of 12 with padding: 6 6 | 4 4 3, and one more would need a third.
    lengths = [4, 6, 3, 6, 4]
    budget = TokenBudget(12, 2, None)
    (group,) = budget.groups(counts_of(lengths), seed=0)
    assert sorted(group) == [0, 1, 2, 3, 4]
    assert budget.assign_to_ranks([group], counts_of(lengths), world_size=2) == [
        [(1,), (3,)],
        [(0,), (4,), (2,)],
    ]
    assert len(budget.groups(counts_of([*lengths, 1]), seed=0)) == 2
    assert budget.fill([group], counts_of(lengths)) == 23 / 24


def test_ranks_without_samples_have_empty_micro_batches():
    for row_tokens in (20, None):
        budget = TokenBudget(20, 4, row_tokens)
        groups = budget.groups(counts_of([5, 5]), seed=0)
        dealt = budget.assign_to_ranks(groups, counts_of([5, 5]), world_size=4)
        assert dealt == [[(0,)], [(1,)], [], []]


@pytest.mark.parametrize("row_tokens", [20, None])
def test_the_last_step_has_no_more_micro_batches_than_it_needs(row_tokens):
    counts = counts_of([5, 5, 5])
    budget = TokenBudget(20, 8, row_tokens)
    dealt = budget.assign_to_ranks(budget.groups(counts, seed=0), counts, world_size=2)
    assert [sum(map(len, rows)) for rows in dealt] == [2, 1]
