"""What a quick run of the tests leaves out: some combinations, and some points of failure."""

import os
from itertools import combinations, product

# Everything, where the default run takes a spread: DSCHAT_LORA_TESTS=all, as `make test-all` sets.
ALL = os.environ.get("DSCHAT_LORA_TESTS") == "all"


def pairwise(factors, allowed=lambda row: True, rows=()):
    """Few rows in which each pair of values of two factors meets; each row, if all are asked for.

    Greedy: of the rows of the full product, the first that brings most pairs that are missing.

    Args:
        factors: name -> its values.
        allowed: whether a row, name -> value, may be; a pair that no such row has is left out.
        rows: rows to begin with, whatever they bring.

    Returns:
        The rows, those of ``rows`` first.
    """
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    every = [row for row in every if allowed(row)]
    if ALL:
        return every
    chosen = list(rows)
    missing = set().union(*map(pairs, every)).difference(*map(pairs, chosen))
    while missing:
        chosen.append(max(every, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def pairs(row):
    """The pairs ``((name, value), (name, value))`` of a row."""
    return set(combinations(row.items(), 2))
