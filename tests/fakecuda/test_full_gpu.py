"""Step 3 on a fake GPU that is full where training follows a rollout."""

import json

import pytest

from fakecuda.full_run import iterate, record_of

pytestmark = pytest.mark.stage


def iteration(fake_device, directory, *, decoded, memory):
    """An iteration, ``decoded`` responses at a time: what was noted, its record and events."""
    noted, out = iterate(
        fake_device,
        directory,
        *("--per_device_generation_batch_size", str(decoded), "--max_steps", "1"),
        *("--generation_batches", str(64 // decoded), "--per_device_training_batch_size", "64"),
        *("--max_num_seqs", str(decoded)),
        memory=memory,
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return noted, record_of(out), [line["message"] for line in lines if line["kind"] == "event"]


@pytest.mark.thorough
def test_what_decoding_keeps_makes_room_for_training(fake_device, tmp_path):
    # Keys and values take 64 MiB, training 228.
    noted, record, events = iteration(fake_device, tmp_path, decoded=64, memory=260)
    assert noted["error"] is None
    assert record["memory"]["keeps_cache"]
    assert record["status"] == "finished"
    assert events == [
        "the GPU ran out of memory for training next to the KV cache, which was freed; from here "
        "on it is freed after every rollout, as with --release_inference_cache, which does not "
        "change results"
    ]


@pytest.mark.thorough
def test_training_that_does_not_fit_alone_ends_with_what_to_lower(fake_device, tmp_path):
    # Keys and values take 16 MiB.
    noted, record, _ = iteration(fake_device, tmp_path, decoded=16, memory=150)
    assert noted["error"] == "exit 1"
    status = record["status"]
    assert status.startswith("failed: OutOfMemoryError: out of GPU memory while training: by ")
    assert (
        "then compute fewer rows at once (--per_device_training_batch_size 32 "
        "--gradient_accumulation_steps 2), then recompute activations "
        "(--actor_gradient_checkpointing)"
    ) in status
    assert "for decoding" not in status  # it was freed before
