"""Rows of samples, and steps of them: every sample once an epoch, whatever the shape of a run."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.loader import StepLoader, eval_batches
from dschat_lora.data.packing import (
    PackedRows,
    SampleCounts,
    TokenBudget,
    fill,
    first_fit,
    keep_rows,
    make_rows,
)
from dschat_lora.data.samples import (
    PairSample,
    SequenceSample,
    TokenSet,
    UnpairedSample,
    write_samples,
)
from helpers.addons import of_addon
from helpers.drawing import drawing

UNPAIRED = of_addon("kto.batch:UnpairedCollator")
SIZE, CAPACITY, BUDGET = 23, 30, 50


def samples():
    rng = np.random.default_rng(3)
    made = []
    for number, length in enumerate(rng.integers(1, 13, SIZE)):
        labels = np.where(rng.random(length) < 0.5, IGNORE_INDEX, 7).astype(np.int32)
        labels[0] = 7 if number % 2 else IGNORE_INDEX  # never counts
        made.append(SequenceSample.of(np.full(length, 5, np.int32), labels))
    return made


def pairs():
    rng = np.random.default_rng(4)
    made = []
    for number in range(SIZE):
        prompt = int(rng.integers(0, 4)) if number else 0
        shared = prompt + int(rng.integers(0, 3))
        chosen, rejected = map(int, rng.integers(1, 10 if number % 4 else 3, 2))
        ids = np.arange(1, 1 + shared + chosen + rejected, dtype=np.int32)
        made.append(PairSample(ids, prompt, shared, chosen))
    return made


def unpaired():
    return [
        UnpairedSample(pair.chosen, pair.rejected[pair.prompt_length :], pair.prompt_length, 1)
        for pair in pairs()
    ]


CASES = {
    "samples": (samples, SampleCollator(0)),
    "samples, rounded": (samples, SampleCollator(0, multiple_of=4)),
    **{
        f"pairs, {layout}{', tight' * tight}": (pairs, PairCollator(0, layout, 4, tight=tight))
        for layout in ("shared", "separate", "alone")
        for tight in (False, True)
    },
}
if UNPAIRED:
    CASES["unpaired"] = unpaired, UNPAIRED[0](0, 4)
# Rows of one sample or several; micro-batches of so many tokens in one row, several, or of one each
ROW_TOKENS = {"budget": BUDGET, "budget of rows": CAPACITY, "budget of one": None}
KINDS = ("single", "packed", *ROW_TOKENS)


class Keeping:
    """A collator that keeps the samples which its batches are of."""

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)

    def __call__(self, rows):
        return SimpleNamespace(batch=self.own(rows), rows=rows)

    def empty(self):
        return SimpleNamespace(batch=self.own.empty(), rows=[])


def steps_of(data, collate, kind, shape, *, seed=1, epoch=0, start=0):
    """For each step, the windows of all ranks; the shape is micro batch, accumulation, ranks."""
    micro, accumulation, world = shape
    counts, budget = collate.counts(TokenSet.of(data)), None
    if kind in ROW_TOKENS:
        budget = TokenBudget(BUDGET, micro * accumulation * world, ROW_TOKENS[kind])
        micro, accumulation = 1, micro * accumulation
        rows = budget.groups(counts, seed=seed)
    else:
        rows = make_rows(counts.tokens, max_seq_len=CAPACITY, packing=kind == "packed", seed=seed)
    loaders = [
        StepLoader(
            data,
            rows=rows,
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world,
            seed=seed,
            collate=Keeping(collate),
            budget=budget,
        )
        for rank in range(world)
    ]
    steps = list(zip(*(loader.epoch(epoch, start) for loader in loaders), strict=True))
    assert len(steps) == loaders[0].steps_per_epoch - start
    return steps


def numbers_of(data, steps):
    """Numbers of the samples of each step."""
    numbers = {id(sample): number for number, sample in enumerate(data)}
    return [
        sorted(
            numbers[id(sample)]
            for window in windows
            for kept in window
            for row in kept.rows
            for sample in row
        )
        for windows in steps
    ]


def chosen_targets(batch):
    """Predictions that the first half of a batch's sequences own."""
    owner = getattr(batch, "owner", None)
    expected = 0 if owner is None else int((owner < batch.num_samples).sum())
    assert batch.num_chosen_targets == expected
    return expected


def summed(batches):
    """Counts of the batches themselves."""
    shapes = [batch.input_ids.shape for batch in batches]
    names = ("num_samples", "num_tokens", "num_targets", "num_attended")
    return {name: sum(getattr(batch, name) for batch in batches) for name in names} | {
        "num_positions": sum(rows * width for rows, width in shapes),
        "num_scored_pairs": sum(rows * width**2 for rows, width in shapes),
        "num_chosen_targets": sum(map(chosen_targets, batches)),
    }


@pytest.mark.parametrize("case", CASES)
@drawing(30)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(*[st.integers(1, 3)] * 3),
    seed=st.integers(0, 99),
    epoch=st.integers(0, 2),
    size=st.integers(1, SIZE),
)
def test_every_sample_is_in_one_step_whatever_the_shape(case, kind, shape, seed, epoch, size):
    make, collate = CASES[case]
    assume(kind in ("single", "budget of one") or getattr(collate, "layout", "") != "alone")
    data, drawn = make()[:size], {"seed": seed, "epoch": epoch}
    steps = steps_of(data, collate, kind, shape, **drawn)
    numbers = numbers_of(data, steps)
    assert sorted(number for step in numbers for number in step) == list(range(size))
    alone = steps_of(data, collate, kind, (1, int(np.prod(shape)), 1), **drawn)
    assert numbers_of(data, alone) == numbers
    later = steps_of(data, collate, kind, shape, start=len(steps) // 2, **drawn)
    assert numbers_of(data, later) == numbers[len(steps) // 2 :]
    micro, accumulation, world = shape
    for windows in steps:
        (length,) = {len(window) for window in windows}
        batches = [kept.batch for window in windows for kept in window]
        assert all(window.counts == summed(batches) for window in windows)
        if kind not in ROW_TOKENS:
            rows = [kept.rows for window in windows for kept in window]
            assert max(map(len, rows)) <= micro
            assert length == -(-sum(map(len, rows)) // (micro * world)) <= accumulation
            continue
        assert length <= micro * accumulation
        assert max(batch.num_tokens for batch in batches) <= BUDGET
        if kind == "budget of one":
            rows = [row for window in windows for kept in window for row in kept.rows]
            assert {*map(len, rows)} == {1}
            assert (
                max(positions_of(collate, kept) for window in windows for kept in window) <= BUDGET
            )


def positions_of(collate, kept):
    """Positions of a micro-batch whose width is not rounded up."""
    return replace(collate, multiple_of=1)(kept.rows).input_ids.numel() if kept.rows else 0


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_and_seeds_have_orders_of_their_own(kind):
    data, orders = samples(), set()
    for seed in (5, 6):
        for epoch in range(3):
            steps = steps_of(data, SampleCollator(0), kind, (1, 1, 1), seed=seed, epoch=epoch)
            orders.add(str(numbers_of(data, steps)))
    assert len(orders) == 6


def loader_of(lengths, shape, *, rank=0):
    """A loader of one sample a row, of these lengths."""
    micro, accumulation, world = shape
    return StepLoader(
        [SequenceSample(np.full(size, 9, np.int32), (1, size - 1)) for size in lengths],
        rows=[(index,) for index in range(len(lengths))],
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        rank=rank,
        world_size=world,
        seed=5,
        collate=SampleCollator(0),
    )


def test_micro_batches_hold_rows_of_like_length_and_ranks_as_many_tokens():
    lengths = np.random.default_rng(1).integers(1, 9, 16).tolist()
    (step,) = loader_of(lengths, (4, 4, 1)).epoch(0)
    assert [batch.input_ids.shape[1] for batch in step] == sorted(lengths, reverse=True)[::4]
    ranks = [next(loader_of(lengths, (4, 1, 4), rank=rank).epoch(0)) for rank in range(4)]
    tokens = [sum(batch.num_tokens for batch in batches) for batches in ranks]
    assert max(tokens) - min(tokens) <= max(lengths) - min(lengths)


def test_ranks_without_rows_have_empty_batches_and_no_rows_are_no_steps():
    windows = [next(loader_of([3, 2, 4], (1, 1, 4), rank=rank).epoch(0)) for rank in range(4)]
    assert [batch.num_samples for (batch,) in windows] == [1, 1, 1, 0]
    assert windows[3][0].input_ids.tolist() == [[0]]
    assert list(loader_of([], (1, 1, 1)).epoch(0)) == []


@drawing(30)
@given(count=st.integers(0, 12), world=st.integers(1, 4), size=st.integers(1, 3))
def test_evaluation_sees_each_row_once_on_equally_many_batches(count, world, size):
    data = samples()[:count]
    options = {"batch_size": size, "world_size": world, "collate": Keeping(SampleCollator(0))}
    rows = [(index,) for index in range(count)]
    ranks = [list(eval_batches(data, rows=rows, rank=rank, **options)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {-(-count // (size * world))}
    assert all(len(kept.rows) <= size for batches in ranks for kept in batches)
    assert numbers_of(data, [ranks]) == [list(range(count))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [SIZE, 5000])
def test_a_stored_set_is_counted_as_its_samples_are(case, tmp_path, size):
    make, collate = CASES[case]
    data = (make() * (size // SIZE + 1))[:size]  # more than one part of a file
    kind = {PairCollator: "pairs", SampleCollator: "samples"}.get(type(collate), "unpaired")
    write_samples(tmp_path / "set.arrow", data, kind)
    whole = TokenSet.read(tmp_path / "set.arrow", kind)
    stored = collate.counts(whole)
    np.testing.assert_array_equal(collate.positions(whole), stored.positions)
    alone = [replace(collate, multiple_of=1)([[each]]) for each in data[:SIZE]]
    expected = {
        "tokens": [batch.num_tokens for batch in alone],
        "targets": [batch.num_targets for batch in alone],
        "attended": [batch.num_attended for batch in alone],
        "positions": [batch.input_ids.numel() for batch in alone],
        "chosen_targets": [batch.num_chosen_targets for batch in alone],
    }
    for name, values in expected.items():
        counted = getattr(stored, name)
        assert counted.dtype == np.int64
        np.testing.assert_array_equal(counted, np.resize(values, size))


# ------------------------------------------------------------------------------------- packing


def slow_first_fit(lengths, capacity):
    rows = []
    for position, length in enumerate(lengths):
        fitting = (row for row in rows if sum(lengths[n] for n in row) + length <= capacity)
        row = next(fitting, None)
        if row is None:
            rows.append(row := [])
        row.append(position)
    return rows


def fitted(lengths, capacity):
    return [list(row) for row in first_fit(np.array(lengths, np.int64), capacity)]


@drawing(60)
@given(lengths=st.lists(st.integers(1, 64), max_size=80), seed=st.integers(0, 99))
def test_samples_go_into_the_first_row_with_room_in_an_order_of_the_seed(lengths, seed):
    with mock.patch("dschat_lora.data.packing.ITEMS_AT_A_TIME", 10):
        assert fitted(lengths, 64) == slow_first_fit(lengths, 64)
        rows = make_rows(np.array(lengths, np.int64), max_seq_len=64, packing=True, seed=seed)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)


def test_rows_by_hand():
    assert fitted([6, 5, 4, 5, 1], 10) == [[0, 2], [1, 3], [4]]
    with pytest.raises(ValueError, match="a sample of 11 tokens does not fit a row of 10"):
        fitted([3, 11], 10)
    assert make_rows(np.array([3, 1]), max_seq_len=10, packing=False, seed=0) == [(0,), (1,)]
    assert fill([(0, 1), (2,)], np.array([4, 5, 3]), 10) == 0.6
    assert fill([], np.array([]), 10) == 0


def test_rows_do_not_follow_file_order():
    rows, others = (
        make_rows(np.full(100, 10), max_seq_len=20, packing=True, seed=seed) for seed in (0, 1)
    )
    assert len(rows) == 50
    assert sum(abs(first - second) == 1 for first, second in rows) < 10
    assert rows != others


def test_rows_are_kept_for_equal_keys(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    made = []

    def make():
        made.append(make_rows(lengths, max_seq_len=64, packing=True, seed=0))
        return made[-1]

    rows = [keep_rows(tmp_path, [64, key], make) for key in ("a", "a", "b")]
    assert len(made) == 2
    assert rows[0] == rows[1] == rows[2] == made[0]
    assert rows[1][3:5] == [rows[1][3], rows[1][4]]
    assert rows[1][-1] == made[0][len(made[0]) - 1]
    with pytest.raises(IndexError):
        rows[1][len(rows[1])]
    # A cache that cannot be written costs no more than time.
    (tmp_path / "file").write_text("")
    packed = PackedRows.of([(0, 2), (1,)])
    assert keep_rows(tmp_path / "file", [1], lambda: packed) is packed


# ------------------------------------------------------------------------------------- budgets


def counts_of(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    return SampleCounts(lengths, lengths - 1, lengths * (lengths + 1) // 2, lengths, 0 * lengths)


@pytest.mark.parametrize("row_tokens", [400, 100])  # in one row, or several
def test_micro_batches_of_a_budget_are_full_and_alike(row_tokens):
    lengths = np.minimum(100, np.random.default_rng(0).geometric(1 / 25, 500))
    counts, budget = counts_of(lengths), TokenBudget(400, 8, row_tokens)
    groups = budget.groups(counts, seed=5)
    assert budget.fill(groups, counts) > 0.97
    size = budget.groups_per_step
    for start in range(0, len(groups), size):
        batches = budget.assign_to_ranks(groups[start : start + size], counts, world_size=2)
        rows = [[int(lengths[list(row)].sum()) for row in batch] for batch in batches]
        tokens = [sum(batch) for batch in rows]
        assert [len(batch) for batch in rows] == [-(-each // row_tokens) for each in tokens]
        # Rows are as long as each other, nearly; what is left at the end is shared out too.
        positions = sum(len(batch) * max(batch) for batch in rows)
        assert sum(tokens) >= (1 if row_tokens == 400 else 0.95) * positions
        if start + size <= len(groups):
            assert len(tokens) == 8
            assert max(tokens) < 1.03 * np.mean(tokens)
        assert max(tokens) - min(tokens) < 100


@pytest.mark.parametrize(
    ("budget", "lengths", "groups", "world_size", "expected"),
    [
        # 9 | 8, then 7 to 8, 6 to 9, 5 where the first has 15 (number 0), 4 to the other.
        *[((20, 2, 20), [9, 8, 7, 6, 5, 4], [(0, 1), (2, 3, 4, 5)], 2, [[(0, 3, 4)], [(1, 2, 5)]])],
        # The longest first: 5 | 5, 5 + 4, 5 + 3, then no room for the other 3.
        *[((10, 2, 10), [4, 3, 3, 5, 5], [(0, 1, 2), (3, 4)], 1, [[(0, 1, 2)], [(3, 4)]])],
        # Two micro-batches of 12 with padding: 6 6 | 4 4 3.
        *[((12, 2, None), [4, 6, 3, 6, 4], None, 2, [[(1,), (3,)], [(0,), (4,), (2,)]])],
        *[((20, 4, row), [5, 5], None, 4, [[(0,)], [(1,)], [], []]) for row in (20, None)],
    ],
)
def test_micro_batches_by_hand(budget, lengths, groups, world_size, expected):
    budget, counts = TokenBudget(*budget), counts_of(lengths)
    groups = groups or budget.groups(counts, seed=0)
    assert budget.assign_to_ranks(groups, counts, world_size=world_size) == expected


def test_a_step_of_single_samples_takes_as_many_as_fit():
    budget, lengths = TokenBudget(12, 2, None), [4, 6, 3, 6, 4]
    (group,) = budget.groups(counts_of(lengths), seed=0)
    assert sorted(group) == [0, 1, 2, 3, 4]
    assert budget.fill([group], counts_of(lengths)) == 23 / 24
    assert len(budget.groups(counts_of([*lengths, 1]), seed=0)) == 2  # a third would be needed


@pytest.mark.parametrize("row_tokens", [20, None])
def test_the_last_step_has_no_more_micro_batches_than_it_needs(row_tokens):
    counts = counts_of([5, 5, 5])
    budget = TokenBudget(20, 8, row_tokens)
    dealt = budget.assign_to_ranks(budget.groups(counts, seed=0), counts, world_size=2)
    assert [sum(map(len, rows)) for rows in dealt] == [2, 1]
