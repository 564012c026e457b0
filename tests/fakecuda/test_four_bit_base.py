"""PPO of all four roles on one 4-bit base, on a fake GPU of 12 GiB."""

import json

import pytest

from benchmarks.common import shapes
from fakecuda.test_memory_of_roles import write_base
from helpers.spread import ALL

pytestmark = [
    pytest.mark.stage,
    pytest.mark.skipif(not ALL, reason="minutes; part of make test-all"),
]


def test_ppo_on_a_6_7b_base_in_four_bits_fits_12_gib(fake_device, tmp_path):
    base, data = tmp_path / "base", tmp_path / "prompts.jsonl"
    base.mkdir()
    write_base(base, shapes.SHAPES["opt-6.7b"])
    rows = [{"prompt": f"{n} " + "word " * 253} for n in range(16)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = fake_device.run(
        "fakecuda.programs:stage",
        script="training/step3_rlhf/main.py",
        card="3060",
        options=[
            *("--actor_model_name_or_path", str(base), "--data_path", str(data)),
            # On this device responses are empty, so that prompts have to fill the rows.
            *("--max_prompt_seq_len", "512", "--max_answer_seq_len", "1", "--base_bits", "4"),
            *("--per_device_generation_batch_size", "4", "--per_device_training_batch_size", "4"),
            *("--actor_lora_dim", "16", "--critic_lora_dim", "16", "--generation_batches", "1"),
            *("--actor_gradient_checkpointing", "--critic_gradient_checkpointing"),
            *("--reward_function", "fakecuda.programs:no_reward", "--eval_ratio", "0.25"),
            *("--max_steps", "1", "--output_dir", str(tmp_path / "out")),
        ],
    )
    assert found["error"] is None, fake_device.log()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert found["peak"] == pytest.approx(record["memory"]["peak"], rel=0.1)
    assert found["peak"] <= 12 * 2**30
