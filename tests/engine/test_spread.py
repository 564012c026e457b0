"""The combinations that a quick run of the tests takes."""

from itertools import combinations, product

import pytest

import engine.test_pair_trajectories as pair_trajectories
import engine.test_peft_loop as peft_loop
import engine.test_trajectories as trajectories
from helpers import spread
from helpers.spread import pairwise

TABLES = {
    "types": (
        {"dtype": ("fp32", "bf16", "fp16"), "size": (1, 2), "stage": (0, 1, 2, 3)},
        trajectories.ROWS,
    ),
    "what trains": (trajectories.FACTORS, trajectories.COMBINATIONS),
    "clipping": (
        {"norm": tuple(peft_loop.NORMS), "size": (1, 2), "stage": (0, 1, 2, 3)},
        peft_loop.CLIPPED,
    ),
    "pairs": (pair_trajectories.FACTORS, pair_trajectories.ROWS),
}


def missing_pairs(factors, rows):
    """``(name, value, name, value)`` of each two values that meet in no row."""
    return {
        (first, a, second, b)
        for first, second in combinations(factors, 2)
        for a, b in product(factors[first], factors[second])
        if not any(row[first] == a and row[second] == b for row in rows)
    }


@pytest.mark.parametrize("name", TABLES)
def test_each_pair_of_values_is_in_a_row(name):
    expected = {
        "what trains": {
            *(("trained", each, "dtype", "fp16") for each in ("every weight", "adapters and base")),
            ("stage", 0, "offload", True),
        }
    }
    assert missing_pairs(*TABLES[name]) == expected.get(name, set())


@pytest.mark.parametrize("name", TABLES)
def test_rows_are_few_and_each_is_there_once(name, monkeypatch):
    factors, rows = TABLES[name]
    assert len({tuple(row.items()) for row in rows}) == len(rows)
    assert all(row[n] in factors[n] for row in rows for n in factors)
    # No fewer can hold all pairs of the two largest factors.
    first, second = sorted(map(len, factors.values()))[-2:]
    assert spread.ALL or len(rows) <= first * second + 3


def test_pairwise_takes_the_rows_asked_for_first_and_leaves_out_what_may_not_be(monkeypatch):
    monkeypatch.setattr(spread, "ALL", False)
    factors, first = {"a": (1, 2), "b": (1, 2), "c": (1, 2)}, {"a": 2, "b": 1, "c": 2}
    rows = pairwise(factors, lambda row: (row["a"], row["b"]) != (1, 2), rows=[first])
    assert rows[0] == first
    assert missing_pairs(factors, rows) == {("a", 1, "b", 2)}
    assert len(rows) < 6
    monkeypatch.setattr(spread, "ALL", True)
    assert len(pairwise(factors, lambda row: row["c"] != row["a"])) == 4
