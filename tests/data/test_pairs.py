"""Pairs from their rows to tensors: tokens, store, counts and layouts by hand."""

import numpy as np
import pytest
import torch

from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.config.data import DataConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.data.readers import RowError
from dschat_lora.data.rows import check_sources
from helpers.pairs import Answers, ragged_pairs, with_a_prefix

# From files


@pytest.fixture
def prepared(run, jsonl):
    """What rows are prepared as, with settings of its own for one call."""
    return lambda rows, kind="pairs", **more: run(jsonl(rows), phase=2, kind=kind, **more)


def preference(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | more


def test_pairs_of_a_file_are_counted_by_what_became_of_them(prepared):
    result = prepared(
        [
            preference("ab", "cd", "e", margin=2),
            preference("ab", "same", "same"),
            preference("ab", "c" * 9 + "x", "c" * 9 + "y"),
            preference("ab", "x" + "c" * 9, "y"),
            preference("ab", "f", "gh"),
        ],
        max_seq_len=9,
        overlong="truncate",
    )
    audit = result.audit
    assert audit.train_rows == 5
    assert audit.identical_rows == 2
    assert audit.truncated_rows == 1
    assert audit.dropped_rows == 0
    assert audit.train_samples == len(result.train) == 3
    # trees: ab cd$ e$, ab x+6 c y$, ab f$ gh$; answers: 3+2, 7+2, 2+3
    assert audit.tokens == 7 + 11 + 7
    assert audit.supervised_tokens == 5 + 9 + 5
    assert audit.eos_samples == 2
    assert audit.rows_by_type == {"preference": 5}
    assert [result.train[i].margin for i in range(3)] == [2.0, 0.0, 0.0]
    assert any("2 pairs of equal answers left out" in line for line in audit.lines())


def test_a_run_without_a_pair_left_stops_with_the_reason(prepared):
    with pytest.raises(ValueError, match=r"of 2 training rows 2 with equal answers"):
        prepared([preference("a", "b", "b"), preference("c", "d", "d")]).audit.check()


def test_pairs_repeat_if_both_answers_do(prepared):
    rows = [
        preference("a", "b", "c"),
        preference("a", "b", "d"),
        preference("a", "b", "c"),
        preference("a", "c", "b"),
    ]
    assert prepared(rows).audit.duplicate_rows == 1
    assert prepared(rows, kind="samples").audit.duplicate_rows == 2


def test_held_out_pairs_are_known_by_both_answers(prepared, jsonl):
    held_out = jsonl([preference("a", "b", "c")], "eval.jsonl")
    rows = [preference("a", "b", "c"), preference("a", "b", "d")]
    options = {"eval_data_path": (str(held_out),)}
    assert prepared(rows, **options).audit.overlap_rows == 1
    assert prepared(rows, kind="samples", **options).audit.overlap_rows == 2


def test_pairs_and_samples_of_one_file_are_cached_apart(prepared):
    rows = [preference("a", "b", "c")]
    first, second = prepared(rows), prepared(rows, kind="samples")
    assert first.fingerprint != second.fingerprint
    assert not second.from_cache
    assert prepared(rows).from_cache
    assert prepared(rows).train[0].rejected.tolist() == first.train[0].rejected.tolist()


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "a", "completion": "b"}, r"\['completion', 'prompt'\]"),
        ({"text": "a"}, r"\['text'\]"),
        ({"prompt": "a"}, r"\['prompt'\]"),
    ],
)
def test_a_row_without_two_answers_is_refused_with_its_place(prepared, jsonl, row, found):
    message = rf"train\.jsonl:2: row lacks 'chosen' and 'rejected'; it has {found}; this stage com"
    rows = [preference("a", "b", "c"), row]
    with pytest.raises(RowError, match=message):
        prepared(rows)
    config = DataConfig(data_path=(str(jsonl(rows)),))
    with pytest.raises(RowError, match=message):
        check_sources(config, "pairs")
    skipped = prepared(rows, bad_rows="skip").audit
    assert (skipped.bad_rows, skipped.train_samples) == (1, 1)


# Batches

FIRST = Answers([5, 6], [7, 8, 9], [7, 10], 0.5, (-1.0, -2.0))
SECOND = Answers([11], [12], [13, 14], -1.0, (-3.0, -4.0))


def collate(layout, *rows, **options):
    return PairCollator(3, layout, **options)([[pair.sample() for pair in row] for row in rows])


def check(batch, **expected):
    for name, values in expected.items():
        found = getattr(batch, name)
        found = found.tolist() if isinstance(found, torch.Tensor) else found
        assert found == values, name


# What all layouts have in common: sequences are chosen of both pairs, then rejected.
SAME = {
    "answer_lengths": [3, 1, 2, 2],
    "target_ids": [7, 8, 9, 12, 7, 10, 13, 14],
    "owner": [0, 0, 0, 1, 2, 2, 3, 3],
    "compared_pair": [0, 1],
    "margins": [0.5, -1.0],
    "reference": [-1.0, -3.0, -2.0, -4.0],
    "num_targets": 8,
    "num_samples": 2,
}


@pytest.mark.parametrize(
    ("layout", "rows", "expected"),
    [
        (
            "shared",
            [[FIRST, SECOND]],
            {
                # the beginning 5 6 7, chosen 8 9, rejected 10; the beginning 11, 12, 13 14
                "input_ids": [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 3, 3]],
                "position_ids": [[0, 1, 2, 3, 4, 3, 0, 1, 1, 2, 0, 0]],
                "segment_ids": [[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]],
                "branch_ids": [[0, 0, 0, 1, 1, 2, 0, 1, 2, 2, 0, 0]],
                "ends": [4, 7, 5, 9],
                "logit_positions": [1, 2, 3, 6, 1, 2, 6, 8],
                "compared": [[3, 7], [5, 8]],
                "num_tokens": 10,
                # 3 shared, 2 of chosen, 1 of rejected; 1, 1, 2
                "num_attended": (1 + 2 + 3) + (4 + 5) + 4 + 1 + 2 + (2 + 3),
            },
        ),
        (
            "separate",
            [[FIRST, SECOND]],
            {
                "input_ids": [[5, 6, 7, 8, 9, 5, 6, 7, 10, 11, 12, 11, 13, 14, 3, 3]],
                "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 0]],
                "segment_ids": [[1] * 5 + [2] * 4 + [3] * 2 + [4] * 3 + [0] * 2],
                "branch_ids": [[0] * 16],
                "ends": [4, 10, 8, 13],
                "logit_positions": [1, 2, 3, 9, 6, 7, 11, 12],
                "compared": [[3, 10], [8, 12]],
                "num_tokens": 14,
                "num_attended": 15 + 10 + 3 + 6,
            },
        ),
        (
            "alone",
            [[FIRST], [SECOND]],
            {
                "input_ids": [
                    *([5, 6, 7, 8, 9, 3, 3, 3], [5, 6, 7, 10, 3, 3, 3, 3]),
                    *([11, 12, 3, 3, 3, 3, 3, 3], [11, 13, 14, 3, 3, 3, 3, 3]),
                ],
                "position_ids": [[*range(n), *[0] * (8 - n)] for n in (5, 4, 2, 3)],
                "segment_ids": [[1] * n + [0] * (8 - n) for n in (5, 4, 2, 3)],
                "branch_ids": [[0] * 8] * 4,
                "ends": [4, 17, 11, 26],
                "logit_positions": [1, 2, 3, 16, 9, 10, 24, 25],
                "compared": [[3, 17], [11, 25]],
                "num_tokens": 14,
                "num_attended": 15 + 10 + 3 + 6,
            },
        ),
    ],
)
def test_layouts_by_hand(layout, rows, expected):
    check(collate(layout, *rows, multiple_of=4), **expected, **SAME)


LAYOUTS = ("shared", "separate", "alone")


def random_rows(layout):
    pairs = [*ragged_pairs(7, seed=5), *with_a_prefix(), Answers([], [5, 6], [7])]
    if layout == "alone":
        return [[pair] for pair in pairs]
    return [pairs[:3], pairs[3:4], pairs[4:]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_place_is_where_a_walk_along_its_sequence_finds_it(layout):
    rows = random_rows(layout)
    batch = collate(layout, *rows)
    pairs = [pair for row in rows for pair in row]
    sequences = [p.sequences[0] for p in pairs] + [p.sequences[1] for p in pairs]
    tokens, width = batch.input_ids.flatten().tolist(), batch.input_ids.shape[1]
    positions = batch.position_ids.flatten().tolist()
    segments = batch.segment_ids.flatten().tolist()
    branches = batch.branch_ids.flatten().tolist()
    count = len(pairs)
    target_ids, expected_owner, expected_from, expected_compared = [], [], [], []
    walks = []
    for number, sequence in enumerate(sequences):
        # Walk back from the end: the token before is the nearest one to the left, one position
        # lower, in the same row and segment, on the same branch or on none.
        place = batch.ends[number].item()
        walk = [place]
        while positions[walk[0]] > 0:
            here = walk[0]
            walk.insert(
                0,
                next(
                    p
                    for p in range(here - 1, -1, -1)
                    if p // width == here // width
                    and segments[p] == segments[here]
                    and positions[p] == positions[here] - 1
                    and branches[p] in (0, branches[here])
                ),
            )
        assert [tokens[p] for p in walk] == sequence
        walks.append(walk)
        begin = len(pairs[number % count].prompt)
        for t in range(max(1, begin), len(sequence)):
            target_ids.append(sequence[t])
            expected_from.append(walk[t - 1])
            expected_owner.append(number)
    for pair, chosen, rejected in zip(pairs, walks[:count], walks[count:], strict=True):
        left, right = pair.sequences
        differ = False
        for t in range(min(len(left), len(right))):
            differ = differ or left[t] != right[t]
            if differ:
                expected_compared.append((chosen[t], rejected[t]))
    check(
        batch,
        target_ids=target_ids,
        owner=expected_owner,
        logit_positions=expected_from,
        compared=[list(each) for each in zip(*expected_compared, strict=True)],
        margins=torch.tensor([pair.margin for pair in pairs]).tolist(),
        num_samples=count,
        num_targets=len(target_ids),
        num_tokens=sum(s > 0 for s in segments),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attended_pairs_are_those_that_the_mask_lets_through(layout):
    batch = collate(layout, *random_rows(layout))
    mask = block_causal_mask(batch.segment_ids, torch.float32, branch_ids=batch.branch_ids)
    real = batch.segment_ids > 0
    assert batch.num_attended == int((mask[:, 0] == 0)[real].sum())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_has_a_shape_and_nothing_else(layout):
    batch = PairCollator(7, layout).empty()
    check(batch, input_ids=[[7]], position_ids=[[0]], segment_ids=[[0]], branch_ids=[[0]])
    counts = (batch.num_targets, batch.num_tokens, batch.num_samples, batch.num_attended)
    assert counts == (0, 0, 0, 0)
    names = "ends answer_lengths logit_positions target_ids owner compared_pair margins reference"
    for name in names.split():
        assert getattr(batch, name).shape == (0,), name
    assert batch.compared.shape == (2, 0)
    assert {batch.ends.dtype, batch.target_ids.dtype, batch.compared.dtype} == {torch.int64}


def test_several_pairs_do_not_stand_alone():
    with pytest.raises(AssertionError, match="a row of its own"):
        collate("alone", [FIRST, SECOND])


def test_moving_a_batch_moves_its_tensors_and_keeps_its_counts():
    moved = collate("shared", [FIRST]).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 13
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.num_targets == 5


def test_pair_views_are_the_sequences_it_was_made_of():
    for pair in [*ragged_pairs(9), *with_a_prefix()]:
        sample = pair.sample()
        chosen, rejected = pair.sequences
        assert (sample.chosen.tolist(), sample.rejected.tolist()) == (chosen, rejected)
        assert sample.prompt.tolist() == pair.prompt
        alike = sample.shared_length - len(pair.prompt)
        assert sample.num_supervised == len(pair.chosen) + len(pair.rejected) - alike
        np.testing.assert_array_equal(sample.input_ids[: len(chosen)], chosen)


def test_mask_of_a_tree_by_hand():
    # a sample of one sequence, then a tree: 2 shared, 2 of one branch, 1 of the other; padding
    segments = torch.tensor([[1, 2, 2, 2, 2, 2, 0]])
    branches = torch.tensor([[0, 0, 0, 1, 1, 2, 0]])
    positions = torch.tensor([[0, 0, 1, 2, 3, 2, 0]])
    mask = block_causal_mask(segments, torch.float32, branch_ids=branches)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    # A window of two spans a position and the one before it in its sequence, not in the row.
    near = block_causal_mask(
        segments, torch.float32, window=2, branch_ids=branches, position_ids=positions
    )
    assert (near[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("layout", ["shared", "separate", "alone"])
def test_tight_rows_hold_the_same_pairs_under_the_same_numbers(layout):
    pairs = [each.sample() for each in ragged_pairs(40, longest=24)]
    pairs.sort(key=lambda pair: len(pair.input_ids), reverse=True)
    rows = [[pair] for pair in pairs]
    plain, tight = PairCollator(0, layout)(rows), PairCollator(0, layout, tight=True)(rows)
    assert tight.input_ids.shape[1] == plain.input_ids.shape[1]
    fewer = tight.input_ids.shape[0] < plain.input_ids.shape[0]
    assert fewer is (layout != "alone")
    for name in ("num_targets", "num_tokens", "num_samples", "num_attended"):
        assert getattr(tight, name) == getattr(plain, name)
    for name in ("target_ids", "owner", "compared_pair", "margins", "answer_lengths"):
        assert torch.equal(getattr(tight, name), getattr(plain, name))
    for name in ("ends", "logit_positions"):
        found, expected = (
            [
                each.flatten()[getattr(batch, name)].tolist()
                for each in (batch.input_ids, batch.position_ids, batch.branch_ids)
            ]
            for batch in (tight, plain)
        )
        assert found == expected
    real = tight.segment_ids > 0
    assert int(real.sum()) == plain.num_tokens
