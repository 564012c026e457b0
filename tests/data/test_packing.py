import numpy as np
import pytest

from dschat_lora.data.loader import PackedRows, fill, first_fit, keep_rows, make_rows


def slow_first_fit(lengths, capacity):
    rows, room = [], []
    for position, length in enumerate(lengths):
        fitting = [row for row, left in enumerate(room) if left >= length]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            room.append(capacity)
        row = fitting[0]
        rows[row].append(position)
        room[row] -= length
    return rows


def fitted(lengths, capacity):
    return [list(row) for row in first_fit(np.array(lengths, np.int64), capacity)]


def test_first_fit_by_hand():
    assert fitted([6, 5, 4, 5, 1], 10) == [[0, 2], [1, 3], [4]]
    assert fitted([], 10) == []
    assert fitted([10], 10) == [[0]]
    assert fitted([10, 10, 10], 10) == [[0], [1], [2]]


@pytest.mark.parametrize("count", [1, 2, 3, 31, 64, 65, 300])
def test_first_fit_equals_the_slow_loop(count, monkeypatch):
    monkeypatch.setattr("dschat_lora.data.loader.ITEMS_AT_A_TIME", 50)
    rng = np.random.default_rng(count)
    for largest in (5, 20, 64):
        lengths = rng.integers(1, largest + 1, count).tolist()
        assert fitted(lengths, 64) == slow_first_fit(lengths, 64)


def test_a_sample_that_fits_no_row_is_an_error():
    with pytest.raises(ValueError, match="a sample of 11 tokens does not fit a row of 10"):
        fitted([3, 11], 10)


def test_every_sample_is_packed_once_and_no_row_overflows():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    rows = make_rows(lengths, max_seq_len=100, packing=True, seed=3)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(int(lengths[list(row)].sum()) for row in rows) <= 100
    assert len(rows) < 300
    assert rows == make_rows(lengths, max_seq_len=100, packing=True, seed=3)
    assert rows != make_rows(lengths, max_seq_len=100, packing=True, seed=4)


def test_rows_do_not_follow_file_order():
    rows = make_rows(np.full(100, 10), max_seq_len=20, packing=True, seed=0)
    assert len(rows) == 50
    assert sum(abs(first - second) == 1 for first, second in rows) < 10


def test_without_packing_each_sample_is_a_row():
    rows = make_rows(np.array([3, 1]), max_seq_len=10, packing=False, seed=0)
    assert rows == [(0,), (1,)]


def test_fill_is_the_share_of_tokens():
    assert fill([(0, 1), (2,)], np.array([4, 5, 3]), 10) == 0.6
    assert fill([], np.array([]), 10) == 0


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


def test_a_cache_that_cannot_be_written_costs_no_more_than_time(tmp_path):
    (tmp_path / "file").write_text("")
    rows = PackedRows.of([(0, 2), (1,)])
    assert keep_rows(tmp_path / "file", [1], lambda: rows) is rows
