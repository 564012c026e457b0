"""Step 3 on a fake GPU that is full where training follows a rollout."""

import json

import pytest

pytestmark = pytest.mark.stage
MIB = 2**20


def iteration(fake_device, directory, *, decoded, memory):
    """An iteration of 64 responses, ``decoded`` at a time: what was noted, its record and events.

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
            *("--per_device_generation_batch_size", str(decoded), "--max_steps", "1"),
            *("--generation_batches", str(64 // decoded), "--data_path", str(data)),
            *("--per_device_training_batch_size", "64", "--output_dir", str(out)),
        ],
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    events = [line["message"] for line in lines if line["kind"] == "event"]
    return found, json.loads((out / "run.json").read_text()), events


@pytest.mark.thorough
def test_what_decoding_keeps_makes_room_for_training(fake_device, tmp_path):
    # Keys and values take 64 MiB, training 77.
    found, record, events = iteration(fake_device, tmp_path, decoded=64, memory=110)
    assert found["error"] is None
    assert record["memory"]["keeps_cache"]
    assert record["status"] == "finished"
    assert events == [
        "the GPU had no room to train beside what decoding keeps: that was freed, which changes "
        "no result, and is after every rollout from here on, as by --release_inference_cache"
    ]


@pytest.mark.thorough
def test_training_that_does_not_fit_alone_ends_with_what_to_lower(fake_device, tmp_path):
    # Keys and values take 16 MiB.
    found, record, _ = iteration(fake_device, tmp_path, decoded=16, memory=60)
    assert found["error"] == "exit 1"
    status = record["status"]
    assert status.startswith("failed: OutOfMemoryError: out of GPU memory while training: by ")
    assert status.endswith(
        "where training should fit unless another program uses it; compute fewer rows at once "
        "(--per_device_training_batch_size 32 --gradient_accumulation_steps 2), or recompute "
        "activations (--actor_gradient_checkpointing)"
    )
    assert "for decoding" not in status  # it was freed before
