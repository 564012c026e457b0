"""What the loader says of a step is what the batches of all ranks hold."""

from dataclasses import replace

import numpy as np
import pytest

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.loader import StepLoader, TokenBudget, make_rows
from dschat_lora.data.samples import (
    PairSample,
    SequenceSample,
    TokenSet,
    UnpairedSample,
    write_samples,
)
from helpers.addons import of_addon

UNPAIRED = of_addon("kto.batch:UnpairedCollator")

CAPACITY = 30
SIZE = 23


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


@pytest.fixture(scope="module", params=CASES)
def case(request):
    make, collate = CASES[request.param]
    return make(), collate


def chosen_targets(batch):
    """Predictions that the first half of a batch's sequences own."""
    owner = getattr(batch, "owner", None)
    found = 0 if owner is None else int((owner < batch.num_samples).sum())
    assert batch.num_chosen_targets == found
    return found


def summed(windows):
    """Counts of the batches themselves."""
    batches = [batch for window in windows for batch in window]
    shapes = [batch.input_ids.shape for batch in batches]
    names = ("num_samples", "num_tokens", "num_targets", "num_attended")
    return {name: sum(getattr(batch, name) for batch in batches) for name in names} | {
        "num_positions": sum(rows * width for rows, width in shapes),
        "num_scored_pairs": sum(rows * width**2 for rows, width in shapes),
        "num_chosen_targets": sum(map(chosen_targets, batches)),
    }


@pytest.mark.parametrize("kind", ["single", "packed", "budget", "budget of rows", "budget of one"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_window_counts_the_batches_of_all_ranks(case, world_size, kind):
    data, collate = case
    if kind in ("packed", "budget", "budget of rows") and getattr(collate, "layout", "") == "alone":
        pytest.skip("each sequence has a row of its own")
    counts = collate.counts(TokenSet.of(data))
    accumulation, budget = 2, None
    if kind.startswith("budget"):
        row_tokens = {"budget": 50, "budget of rows": CAPACITY, "budget of one": None}[kind]
        budget = TokenBudget(50, accumulation * world_size, row_tokens)
        rows = budget.groups(counts, seed=1)
    else:
        packing = kind == "packed"
        rows = make_rows(counts.tokens, max_seq_len=CAPACITY, packing=packing, seed=1)
    loaders = [
        StepLoader(
            data,
            rows=rows,
            micro_batch_size=1 if budget else 4,
            gradient_accumulation_steps=accumulation,
            rank=rank,
            world_size=world_size,
            seed=1,
            collate=collate,
            budget=budget,
        )
        for rank in range(world_size)
    ]
    for epoch in (0, 1):
        steps = list(zip(*(loader.epoch(epoch) for loader in loaders), strict=True))
        assert len(steps) == loaders[0].steps_per_epoch > 0
        for windows in steps:
            assert len({len(window) for window in windows}) == 1
            for window in windows:
                assert window.counts == summed(windows)
        assert sum(windows[0].counts["num_samples"] for windows in steps) == SIZE


@pytest.mark.parametrize("size", [SIZE, 5000])
def test_a_stored_set_is_counted_as_its_samples_are(case, tmp_path, size):
    data, collate = case
    data = (data * (size // SIZE + 1))[:size]  # more than one part of a file
    kinds = {PairCollator: "pairs", SampleCollator: "samples"}
    kind = kinds.get(type(collate), "unpaired")
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
        found = getattr(stored, name)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, np.resize(values, size))
