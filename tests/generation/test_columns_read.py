"""What decoding attention reads of a cache, of what a masked call reads for the same steps."""

import pytest

from dschat_lora.generation import batch_state, slots
from scripts.columns_read import LENGTHS, decoded

GOALS = [(1, 0.6), (8, 0.5)]  # answers a prompt, and how much at most


@pytest.mark.thorough
@pytest.mark.parametrize(("copies", "most"), GOALS)
@pytest.mark.parametrize("responses", [64, 256], ids=["one batch", "rows are refilled"])
def test_rows_read_their_own_columns_and_copies_their_prompt_once(responses, copies, most):
    assert decoded(rows=64, responses=responses, copies=copies, **LENGTHS).share <= most


@pytest.mark.parametrize(("copies", "most"), GOALS)
def test_a_small_batch_does_so_too(copies, most, monkeypatch):
    for module in (batch_state, slots):
        monkeypatch.setattr(module, "COLUMN_BUCKET", 32)
    monkeypatch.setattr(batch_state, "PROMPT_BUCKET", 16)
    options = {"median": 64, "most": 256, "prompt": (32, 64)}
    counts = decoded(rows=16, responses=16, copies=copies, **options)
    # Blocks are not a fourth as large.
    assert (counts.exact + counts.combined) / counts.masked <= most
