"""The mask of packed rows by hand, and spans of sequences against it."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from dschat_lora.algos.segments import block_causal_mask, find_spans, make_spans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_position_sees_itself_and_what_precedes_it_in_its_sample(dtype):
    mask = block_causal_mask(torch.tensor([[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]]), dtype)
    assert mask.shape == (2, 1, 7, 7)
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {torch.finfo(dtype).min, 0.0}
    seen = (mask == 0).int()
    assert seen[0, 0].tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert seen[1, 0].tolist() == torch.ones(7, 7).tril().int().tolist()


def test_a_row_of_padding_is_not_empty():
    mask = block_causal_mask(torch.zeros(1, 3, dtype=torch.int64), torch.float16)
    assert mask.softmax(-1).isfinite().all()
    assert (mask == 0).sum(-1).tolist() == [[[1, 2, 3]]]


def grids(rows, width):
    """Segment and branch ids of rows of samples, token by token."""
    segments, branches = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    for index, row in enumerate(rows):
        column = 0
        for number, sizes in enumerate(row, start=1):
            for branch, size in enumerate(sizes):
                for _ in range(size):
                    segments[index, column], branches[index, column] = number, branch
                    column += 1
    return segments, branches


def seen_by_spans(spans, total):
    """(total, total) bool: what each query's place sees, one sequence after another."""
    tokens = spans.query_ends[-1]
    places = torch.arange(total) if spans.places is None else spans.places
    keys = torch.arange(tokens) if spans.keys is None else spans.keys
    seen = torch.zeros(total, total, dtype=torch.bool)
    for s, (queries_of, keys_of) in enumerate(spans.lengths):
        queries = range(spans.query_ends[s], spans.query_ends[s + 1])
        own = keys[spans.key_ends[s] : spans.key_ends[s + 1]]
        assert (len(queries), len(own)) == (queries_of, keys_of)
        for i, query in enumerate(queries):
            for key in own[: len(own) - len(queries) + i + 1]:
                seen[places[query], places[key]] = True
    return seen


def random_rows(seed, *, trees):
    rng = np.random.default_rng(seed)

    def sizes():
        size = int(rng.integers(1, 5))
        if not trees or rng.random() < 0.3:
            return size, 0, 0
        return size, *(int(rng.integers(0, 4)) for _ in range(rng.integers(1, 5)))

    return [[sizes() for _ in range(rng.integers(1, 4))] for _ in range(3)]


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_spans_see_what_the_mask_lets_through(seed, trees, extra):
    rows = random_rows(seed, trees=trees)
    width = max(sum(map(sum, row)) for row in rows) + extra
    spans = make_spans(rows, width)
    segments, branches = grids(rows, width)
    seen = seen_by_spans(spans, segments.numel())
    mask = block_causal_mask(segments, torch.float32, branch_ids=branches)[:, 0] == 0
    real = segments > 0
    for row in range(len(rows)):
        part = slice(row * width, (row + 1) * width)
        assert torch.equal(seen[part, part][real[row]], mask[row][real[row]])
        seen[part, part] = False
    assert not seen.any()
    queries, keys = zip(*spans.lengths, strict=True)
    assert spans.longest == (max(queries), max(keys))
    assert (spans.keys is None) == (not any(sum(sizes[2:]) for row in rows for sizes in row))


def assert_same(found, expected):
    for field in fields(expected):
        value, wanted = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(wanted, torch.Tensor):
            assert value.dtype == wanted.dtype
            assert value.tolist() == wanted.tolist()
        else:
            assert value == wanted


@pytest.mark.parametrize("seed", range(3))
def test_spans_are_found_from_the_ids_of_rows(seed):
    rows = random_rows(seed, trees=True)
    width = max(sum(map(sum, row)) for row in rows) + seed
    assert_same(find_spans(*grids(rows, width)), make_spans(rows, width))
    plain = [[(sum(sizes), 0, 0) for sizes in row] for row in rows]
    assert_same(find_spans(grids(rows, width)[0]), make_spans(plain, width))


def test_spans_of_two_rows_by_hand():
    spans = make_spans([[(2, 1, 2), (1, 0, 0)], [(3, 0, 0)]], 7)
    assert spans.lengths == ((3, 3), (2, 4), (1, 1), (3, 3))
    assert spans.longest == (3, 4)
    assert spans.query_ends.tolist() == [0, 3, 5, 6, 9]
    assert spans.key_ends.tolist() == [0, 3, 7, 8, 11]
    assert spans.keys.tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 8]
    assert spans.places.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert spans.query_ends.dtype == spans.key_ends.dtype == torch.int32


def test_full_rows_of_samples_need_no_index():
    spans = make_spans([[(2, 0, 0), (3, 0, 0)], [(5, 0, 0)]], 5)
    assert spans.keys is None
    assert spans.places is None
    assert spans.to("meta").query_ends.is_meta


def test_a_batch_of_padding_has_no_sequence():
    for spans in (make_spans([[]], 1), find_spans(torch.zeros(1, 1, dtype=torch.int64))):
        assert spans.lengths == ()
        assert spans.query_ends.tolist() == spans.key_ends.tolist() == [0]
        assert spans.places.tolist() == []
