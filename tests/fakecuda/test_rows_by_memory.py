"""Responses decoded at a time by the free memory of a fake GPU."""

import pytest

from dschat_lora.perf.cards import USABLE
from fakecuda.full_run import iterate, record_of

pytestmark = pytest.mark.stage


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("card", "rows", "generations"),
    [("4090", 24, 8), ("a100", 256, 8), ("a100", 256, 1), ("h200", 256, 8)],
)
def test_a_rollout_of_8b_stays_below_the_memory_of_the_card(fake_device, card, rows, generations):
    noted = fake_device.run(
        "fakecuda.programs:decode_by_memory", shape="llama-3-8b", card=card, generations=generations
    )
    assert noted["rows"] == rows
    assert noted["planned"] <= USABLE * noted["free"]
    assert noted["planned"] <= noted["peak"] <= (1 + USABLE) / 2 * noted["free"]


@pytest.mark.thorough
def test_a_full_gpu_decodes_half_as_many_and_goes_on(fake_device, tmp_path):
    # Keys and values of all take 64 MiB.
    noted, out = iterate(
        fake_device,
        tmp_path,
        *("--per_device_generation_batch_size", "16", "--generation_batches", "4"),
        *("--per_device_training_batch_size", "8", "--gradient_accumulation_steps", "8"),
        *("--max_steps", "2"),
        memory=60,
    )
    *_, said = fake_device.log().split(f"output: {out}")  # of this run
    assert noted["error"] is None
    assert record_of(out)["status"] == "finished"
    assert "rollouts     64 of 64 responses at a time (--max_num_seqs auto: 0.0625 GiB of" in said
    assert said.count("a GPU ran out of memory with 64 responses decoded at a time; from here") == 1
