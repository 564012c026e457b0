"""Step 3's memory estimate against the peak of a whole run on a fake GPU, all roles included."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import shapes
from dschat_lora import assets
from helpers.spread import ALL

pytestmark = [
    pytest.mark.stage,
    pytest.mark.skipif(not ALL, reason="minutes; part of make test-all"),
]


def write_base(directory, size):
    """A model directory of this size, whose weights are zeros that take no place on the disk."""
    config = shapes._config(size)
    config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(assets.__file__).parent / "model" / name, directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = set(model.all_tied_weights_keys)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in model.state_dict().items():
        if name not in tied:
            start, end = end, end + tensor.numel() * 2
            header[name] = {
                "dtype": "BF16",
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_estimate_of_all_roles_is_the_peak(fake_device, tmp_path, rank, recompute):
    base, data = tmp_path / "base", tmp_path / "prompts.jsonl"
    base.mkdir()
    write_base(base, shapes.SHAPES["opt-1.3b"])
    rows = [{"prompt": f"{n} " + "word " * 253} for n in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # On this device responses are empty, so that prompts have to fill the rows.
    lengths = ["--max_prompt_seq_len", "512", "--max_answer_seq_len", "1"]
    batch = ["--per_device_generation_batch_size", "16", "--per_device_training_batch_size", "16"]
    adapters = ["--actor_lora_dim", str(rank), "--critic_lora_dim", str(rank)]
    checkpointing = [f"--{role}_gradient_checkpointing" for role in ("actor", "critic")]
    found = fake_device.run(
        "fakecuda.programs:stage",
        script="training/step3_rlhf/main.py",
        options=[
            *("--actor_model_name_or_path", str(base), "--data_path", str(data), *lengths, *batch),
            *(*adapters, "--reward_function", "fakecuda.programs:no_reward"),
            *("--max_steps", "2", "--output_dir", str(tmp_path / "out"), "--eval_ratio", "0.25"),
            *(checkpointing if recompute else []),
        ],
    )
    assert found["error"] is None, fake_device.log()
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert found["peak"] == pytest.approx(record["memory"]["peak"], rel=0.1)
