"""Responses decoded at a time by the free memory of a fake GPU."""

import json

import pytest

from dschat_lora.perf.cards import USABLE

pytestmark = pytest.mark.stage
MIB = 2**20


def iteration(fake_device, directory, *options, memory):
    """An iteration of 64 responses: what was noted, its record, and what the run said.

    By estimate the GPU has room for all; it is full at ``memory`` MiB.
    """
    data, out = directory / "prompts.jsonl", directory / "out"
    rows = [{"prompt": f"{n} " + "word " * 80} for n in range(36)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = fake_device.run(
        "fakecuda.programs:stage",
        script="training/step3_rlhf/main.py",
        memory=memory * MIB,
        options=[
            *("--algorithm", "rloo", "--num_generations", "2", "--actor_lora_dim", "8"),
            *("--reward_function", "fakecuda.programs:no_reward", "--eval_prompts", "0"),
            *("--per_device_generation_batch_size", "16", "--generation_batches", "4"),
            *("--per_device_training_batch_size", "8", "--gradient_accumulation_steps", "8"),
            *("--max_steps", "2", "--data_path", str(data), "--output_dir", str(out), *options),
        ],
    )
    *_, said = fake_device.log().split(f"output: {out}")  # of this run
    return found, json.loads((out / "run.json").read_text()), said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("card", "rows", "generations"),
    [("4090", 24, 8), ("a100", 256, 8), ("a100", 256, 1), ("h200", 256, 8)],
)
def test_a_rollout_of_8b_stays_below_the_memory_of_the_card(fake_device, card, rows, generations):
    found = fake_device.run(
        "fakecuda.programs:decode_by_memory", shape="llama-3-8b", card=card, generations=generations
    )
    assert found["rows"] == rows
    assert found["planned"] <= USABLE * found["free"]
    assert found["planned"] <= found["peak"] <= (1 + USABLE) / 2 * found["free"]


@pytest.mark.thorough
def test_a_full_gpu_decodes_half_as_many_and_goes_on(fake_device, tmp_path):
    # Keys and values of all take 64 MiB.
    found, record, said = iteration(fake_device, tmp_path, memory=60)
    assert found["error"] is None
    assert record["status"] == "finished"
    assert "rollouts     64 of 64 responses at a time (--max_num_seqs auto: 0.0625 GiB of" in said
    assert said.count("a GPU was full with 64 responses decoded at a time: 32 are from here") == 1
