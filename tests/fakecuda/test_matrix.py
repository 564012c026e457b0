"""Families x types x ZeRO x stages x cards: every stage of every family ends as it is to."""

from itertools import combinations

import pytest

from fakecuda import matrix
from helpers.spread import ALL, pairs

pytestmark = pytest.mark.stage

ROWS = matrix.rows()
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS if ALL else ROWS[:1], ids=matrix.name_of)
def test_a_stage_ends_as_it_is_to(fake_device, tmp_path, row):
    size = {} if ALL else {"steps": 1, "layers": 1, "more": ("--eval_prompts", "0")}
    noted = matrix.run(fake_device, row, tmp_path, **size)
    assert noted["error"] is None, fake_device.log()
    assert noted["status"] == "finished"
    assert not noted["skipped"]
    counts = noted["products"]
    of_type = sum(n for each, n in counts.items() if each.endswith(f" {TYPES[row['dtype']]}"))
    assert of_type > 0.95 * sum(counts.values()), counts
    assert bool(noted["replays"]) == matrix.captures(row), noted["said"]


def test_rows_are_of_all_families_and_stages_and_of_each_two_settings():
    of = [{name: row[name] for name in ("family", "stage")} for row in ROWS]
    assert len(of) == len(set(map(str, of))) >= 40
    assert {row["family"] for row in of} == set(matrix.FAMILIES)
    met = set().union(*map(pairs, ROWS))
    for (first, values), (second, others) in combinations(matrix.SETTINGS.items(), 2):
        missing = {((first, a), (second, b)) for a in values for b in others} - met
        assert missing <= REFUSED


REFUSED = {
    *((("zero", 0), ("memory", memory)) for memory in ("offload", "offload, recompute")),
    (("processes", "2 to a model"), ("base_bits", 4)),
}


def test_experts_wait_but_for_bf16_on_cards_that_group_products(fake_device):
    noted = {
        (card, dtype): fake_device.run("fakecuda.families:waits_of_experts", card=card, dtype=dtype)
        for card in ("h200", "a100", "t4")
        for dtype in ("bfloat16", "float16")
    }
    assert noted.pop(("h200", "bfloat16")) == 0
    assert set(noted.values()) == {1}
