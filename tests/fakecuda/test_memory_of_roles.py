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
from dschat_lora.perf.cards import USABLE

pytestmark = pytest.mark.stage


def write_base(directory, size):
    """A model directory of this size, whose weights are zeros that take no place on the disk."""
    config = shapes.model_config(size)
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


def peak_of_ppo(fake_device, directory, size, *options, rows, steps, card="h200"):
    """Bytes at the peak of PPO in micro-batches of ``rows`` rows of 512: noted, and estimated."""
    base, data = directory / "base", directory / "prompts.jsonl"
    base.mkdir()
    write_base(base, size)
    prompts = [{"prompt": f"{n} " + "word " * 253} for n in range(4 * rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    batches = [f"--per_device_{phase}_batch_size" for phase in ("generation", "training")]
    noted = fake_device.run(
        "fakecuda.programs:stage",
        script="training/step3_rlhf/main.py",
        card=card,
        options=[
            *("--actor_model_name_or_path", str(base), "--data_path", str(data)),
            # On this device responses are empty, so that prompts have to fill the rows.
            *("--max_prompt_seq_len", "512", "--max_answer_seq_len", "1"),
            *(word for name in batches for word in (name, str(rows))),
            *("--reward_function", "fakecuda.programs:no_reward", "--eval_ratio", "0.25"),
            *("--max_steps", str(steps), "--output_dir", str(directory / "out"), *options),
        ],
    )
    assert noted["error"] is None, fake_device.log()
    record = json.loads((directory / "out" / "run.json").read_text())
    return noted["peak"], record["memory"]["peak"]


def of_both_roles(option, *value):
    return [word for role in ("actor", "critic") for word in (f"--{role}_{option}", *value)]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [16, 128])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_estimate_of_all_roles_is_the_peak(fake_device, tmp_path, rank, recompute):
    options = of_both_roles("lora_dim", str(rank))
    options += of_both_roles("gradient_checkpointing") if recompute else []
    size = shapes.SHAPES["opt-1.3b"]
    peak, estimate = peak_of_ppo(fake_device, tmp_path, size, *options, rows=16, steps=2)
    assert peak == pytest.approx(estimate, rel=0.1)


@pytest.mark.thorough
def test_ppo_on_opt_6_7b_in_four_bits_fits_12_gb(fake_device, tmp_path):
    size = shapes.SHAPES["opt-6.7b"]
    options = [*of_both_roles("lora_dim", "16"), *of_both_roles("gradient_checkpointing")]
    peak, estimate = peak_of_ppo(
        fake_device, tmp_path, size, *options, "--base_bits", "4", rows=8, steps=1, card="3060"
    )
    assert peak == pytest.approx(estimate, rel=0.1)
    assert peak <= USABLE * (12e9 - 0.6 * 2**30)  # which the context and libraries take
