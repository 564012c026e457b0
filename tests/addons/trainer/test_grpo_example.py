"""examples/grpo.py computes what ``dl.rlhf`` does."""

import runpy
from statistics import mean

import pytest
from safetensors.torch import load_file

import dschat_lora as dl
from helpers.launcher import ROOT

EXAMPLE = ROOT / "examples" / "grpo.py"


def test_the_listing_gives_the_numbers_of_rlhf(tmp_path, capsys):
    listing = runpy.run_path(str(EXAMPLE))
    prompts, reward = listing["bundled_prompts"](), listing["about_thirty"]
    figures = listing["train"](prompts, reward, directory=str(tmp_path / "own"), iterations=4)
    run = dl.rlhf(
        data=[{"prompt": prompt} for prompt in prompts],
        algorithm="grpo",
        rewards=[lambda completions, **_: [*map(reward, completions)]],
        kl_coef=listing["KL_COEF"],
        num_generations=listing["GROUP_SIZE"],
        actor_lora_dim=8,
        actor_lora_learning_rate=listing["LEARNING_RATE"],
        reward_scaling="none",
        clip_reward_value=0,
        eval_prompts=0,
        per_device_generation_batch_size=32,
        per_device_training_batch_size=32,
        max_answer_seq_len=listing["MAX_TOKENS"],
        lr_scheduler_type="constant",
        ppo_epochs=listing["UPDATES"],
        max_steps=4 * listing["UPDATES"],
        output_dir=tmp_path / "run",
        quiet=True,
    )
    steps = [line for line in run.metrics if line["kind"] == "train"]
    assert (len(steps), len(figures)) == (4, 8)
    assert all(step["clip_fraction"] > 0 for step in steps)
    for number, step in enumerate(steps, 1):
        own = [each for each in figures if each["iteration"] == number]
        assert mean(each["reward"] for each in own) == pytest.approx(step["reward"], abs=1e-5)
        assert mean(each["loss"] for each in own) == pytest.approx(step["loss"], abs=1e-5)
    assert len({own["loss"] for own in figures}) == 8
    own = load_file(tmp_path / "own" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "run" / "actor" / "adapter" / "adapter_model.safetensors")
    # AdamW divides small gradients by their size, and rounding with them.
    for name, factor in theirs.items():
        assert (own[name] - factor).norm() < 1e-3 * factor.norm()
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 150
