"""Step 3 on a fake GPU that is full before its memory is used up by estimate."""

import json

MIB = 2**20


def iterate(fake_device, directory, *options, memory):
    """Iterations of 64 responses; what was noted, and the directory of the run.

    By estimate the GPU has room for all; it is full at ``memory`` MiB.
    """
    data, out = directory / "prompts.jsonl", directory / "out"
    rows = [{"prompt": f"{n} " + "word " * 80} for n in range(36)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = fake_device.run(
        "fakecuda.programs:stage",
        script="training/step3_rlhf/main.py",
        memory=memory * MIB,
        truth=False,  # no response ends
        options=[
            *("--algorithm", "rloo", "--num_generations", "2", "--actor_lora_dim", "8"),
            *("--reward_function", "fakecuda.programs:no_reward", "--eval_prompts", "0"),
            *("--data_path", str(data), "--output_dir", str(out), *options),
        ],
    )
    return found, out


def record_of(out):
    """The record of a run."""
    return json.loads((out / "run.json").read_text())
