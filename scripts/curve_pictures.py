"""Pictures of docs/how_to_read_the_curves.md: good and bad runs on the bundled model and data.

python scripts/curve_pictures.py output/curves            # every run that is missing, then pictures
python scripts/curve_pictures.py output/curves --draw     # pictures of runs that are there

The runs take about half an hour on two cores, the pictures need matplotlib (the extra ``docs``).
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
_SFT = (
    "sft --lora_dim 16 --lora_alpha 32 --max_seq_len 128 --per_device_train_batch_size 16 "
    "--num_train_epochs 2 --num_warmup_steps 10 --logging_steps 1"
)
_PPO = (
    "rlhf --actor_model_name_or_path sft_good --per_device_generation_batch_size 64 "
    "--per_device_training_batch_size 64 --logging_steps 1"
)
_SCORED = f"{_PPO} --critic_model_name_or_path reward --judge_function dschat_lora.world:rule"
_RULE = f"{_PPO} --reward_function builtin:length=12 --eval_prompts 32 --max_steps 40"
# Arguments of dschat-lora by the name of the output directory, in the order in which they run.
RUNS = {
    "sft_good": f"{_SFT} --lora_learning_rate 1.5e-3",
    "sft_high": f"{_SFT} --lora_learning_rate 1.5e-1",
    "sft_low": f"{_SFT} --lora_learning_rate 1e-5",
    "reward": (
        "reward --model_name_or_path sft_good --lora_learning_rate 2e-3 --max_seq_len 128 "
        "--per_device_train_batch_size 32 --num_warmup_steps 10"
    ),
    "ppo_good": (
        f"{_SCORED} --actor_lora_learning_rate 1e-3 --critic_lora_learning_rate 1e-3 "
        "--kl_coef 0.2 --max_steps 60 --eval_interval 5"
    ),
    "ppo_hacked": (
        f"{_SCORED} --actor_lora_learning_rate 3e-3 --critic_lora_learning_rate 3e-3 "
        "--kl_coef 0 --max_steps 60 --eval_interval 5"
    ),
    "entropy_good": f"{_RULE} --algorithm rloo --num_generations 4 --actor_lora_learning_rate 1e-3",
    "entropy_collapsed": (
        f"{_RULE} --algorithm rloo --num_generations 4 --actor_lora_learning_rate 2e-2 --kl_coef 0"
    ),
    "critic_good": (
        f"{_RULE} --actor_lora_learning_rate 3e-4 --critic_lora_dim 16 "
        "--critic_lora_learning_rate 3e-3"
    ),
    "critic_nothing": (
        f"{_RULE} --actor_lora_learning_rate 3e-4 --critic_lora_dim 16 "
        "--critic_lora_learning_rate 1e-6"
    ),
}


def run_missing(directory: Path) -> None:
    """Start each run whose ``run.json`` does not say that it finished."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, arguments in RUNS.items():
        record = directory / name / "run.json"
        if record.is_file() and json.loads(record.read_text())["status"] == "finished":
            continue
        print(f"$ dschat-lora {arguments} --output_dir {name}", flush=True)
        command = [sys.executable, "-m", "dschat_lora", *shlex.split(arguments)]
        command += ["--output_dir", name, "--overwrite_output_dir"]
        with (directory / f"{name}.log").open("w") as log:
            subprocess.run(command, cwd=directory, stdout=log, stderr=log, check=True)


if __name__ == "__main__":
    run_missing(Path(sys.argv[1]))
