from collections import Counter

import numpy as np
import pytest

from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import StepLoader, eval_batches
from dschat_lora.data.samples import SequenceSample

ROWS = [(0, 1), (2,), (3, 4, 5), (6,), (7, 8), (9,), (10,), (11, 12), (13,), (14,), (15,)]
SHAPES = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)]  # micro, accum, world


class Samples:
    """Sample ``i`` is ``lengths[i]`` tokens of value ``100 + i``."""

    lengths = np.random.default_rng(1).integers(1, 9, 16)

    def __getitem__(self, index):
        ids = np.full(self.lengths[index], 100 + index, dtype=np.int32)
        return SequenceSample.of(ids, ids)


def make_loader(micro=4, accumulation=1, world=1, *, rank=0, seed=5, rows=ROWS):
    return StepLoader(
        Samples(),
        rows=rows,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        rank=rank,
        world_size=world,
        seed=seed,
        collate=SampleCollator(0),
    )


def rows_of(batch):
    """Sample indices of each row that is not padding alone."""
    rows = (dict.fromkeys(ids.tolist()) for ids in batch.input_ids)
    found = [tuple(token - 100 for token in row if token) for row in rows]
    return [row for row in found if row]


def rows_of_step(batches):
    return [row for batch in batches for row in rows_of(batch)]


def all_steps(shape, epoch=0, start_step=0):
    """For each step, the micro-batches of every rank."""
    ranks = [list(make_loader(*shape, rank=r).epoch(epoch, start_step)) for r in range(shape[2])]
    return list(zip(*ranks, strict=True))


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_row_is_seen_once_an_epoch(epoch):
    steps = list(make_loader(2, 2).epoch(epoch))
    assert len(steps) == make_loader(2, 2).steps_per_epoch == 3
    assert sorted(row for step in steps for row in rows_of_step(step)) == sorted(ROWS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rows_of_a_step_do_not_depend_on_the_shape_of_the_run(shape):
    expected = [sorted(rows_of_step(step)) for step in make_loader().epoch(3)]
    got = [
        sorted(row for rank in step for row in rows_of_step(rank)) for step in all_steps(shape, 3)
    ]
    assert got == expected
    assert [len(rows) for rows in got] == [4, 4, 3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_ranks_have_the_same_number_of_micro_batches_of_limited_size(shape):
    micro, accumulation, world = shape
    for step in all_steps(shape):
        assert len({len(batches) for batches in step}) == 1
        assert all(len(rows_of(batch)) <= micro for rank in step for batch in rank)
    full, _, ragged = all_steps(shape)
    assert len(full[0]) == accumulation
    assert len(ragged[0]) == -(-3 // (micro * world))


def test_a_rank_without_rows_gets_an_empty_batch():
    ragged = all_steps((1, 1, 4))[-1]
    assert [batches[0].num_samples > 0 for batches in ragged] == [True, True, True, False]
    assert ragged[3][0].input_ids.tolist() == [[0]]


def test_counts_of_a_step_do_not_depend_on_the_shape_of_the_run():
    def totals(shape):
        return [
            sum(batch.num_targets for rank in step for batch in rank) for step in all_steps(shape)
        ]

    expected = totals((4, 1, 1))
    assert sum(expected) == int((Samples.lengths - 1).sum())
    for shape in SHAPES:
        assert totals(shape) == expected


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(map(tuple, (sorted(rows_of_step(step)) for step in make_loader(seed=s).epoch(e))))
        for s in (5, 6)
        for e in range(4)
    }
    assert len(orders) == 8


def test_a_resumed_epoch_continues_where_it_stopped():
    whole = [rows_of_step(step) for step in make_loader().epoch(2)]
    assert [rows_of_step(step) for step in make_loader().epoch(2, start_step=1)] == whole[1:]
    assert list(make_loader().epoch(2, start_step=3)) == []


def test_micro_batches_hold_rows_of_like_length():
    rows = [(index,) for index in range(16)]
    (step,) = make_loader(4, 4, rows=rows).epoch(0)
    widths = [batch.input_ids.shape[1] for batch in step]
    by_length = sorted(Samples.lengths.tolist(), reverse=True)
    assert widths == by_length[::4]


def test_ranks_of_a_step_differ_by_less_than_one_row_of_tokens():
    rows = [(index,) for index in range(16)]
    ranks = [next(make_loader(4, 1, 4, rank=r, rows=rows).epoch(0)) for r in range(4)]
    tokens = [sum(batch.num_tokens for batch in batches) for batches in ranks]
    assert max(tokens) - min(tokens) <= Samples.lengths.max() - Samples.lengths.min()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_evaluation_sees_each_row_once_on_equally_many_batches(world):
    ranks = [
        list(
            eval_batches(
                Samples(),
                rows=ROWS,
                batch_size=2,
                rank=r,
                world_size=world,
                collate=SampleCollator(0),
            )
        )
        for r in range(world)
    ]
    assert {len(batches) for batches in ranks} == {-(-len(ROWS) // (2 * world))}
    seen = Counter(row for batches in ranks for row in rows_of_step(batches))
    assert seen == Counter(ROWS)


def test_no_rows_give_no_steps():
    assert list(make_loader(rows=[]).epoch(0)) == []
    none = eval_batches(
        Samples(), rows=[], batch_size=2, rank=0, world_size=2, collate=SampleCollator(0)
    )
    assert list(none) == []
