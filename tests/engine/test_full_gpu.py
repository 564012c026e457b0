"""Step 3 on a GPU whose memory runs out beside what decoding keeps: the run is the same."""

import json
from functools import cache

import pytest
import torch

from helpers.rlhf_course import save_family, write_prompts, write_texts

pytestmark = pytest.mark.stage

# Two iterations of eight responses: of two steps, of two micro-batches.
OPTIONS = """
    --max_prompt_seq_len 14 --max_answer_seq_len 8 --max_steps 4 --eval_prompts 0 --eval_ratio 0
    --actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3 --save_interval 0
    --save_minutes 0 --gradient_accumulation_steps 2 --unsup_coef 0.5 --num_warmup_steps 0
""".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory, ranks):
    """``run(size, *options, **planted)``: every rank's report."""
    home = tmp_path_factory.mktemp("full")
    models = save_family("opt", home / "opt")
    write_prompts(home / "prompts.jsonl", 16)
    write_texts(home / "texts.jsonl", 9)

    @cache
    def call(size, *options, failing=(), **planted):
        argv = [
            *("--actor_model_name_or_path", models["actor"]),
            *("--critic_model_name_or_path", models["reward"]),
            *("--data_path", home / "prompts.jsonl", *OPTIONS),
            *("--unsupervised_dataset_name", home / "texts.jsonl"),
            *("--per_device_generation_batch_size", 8 // size),
            *("--per_device_training_batch_size", 2 // size, *options),
            *("--output_dir", home / f"{size} {options} {failing} {planted}"),
        ]
        return ranks(size).run(
            "helpers.full_gpu:train_full",
            argv=list(map(str, argv)),
            failing=failing,
            **planted,
        )

    return call


def same(found, expected):
    """Whether two runs made the same steps, bit for bit."""
    assert [each["steps"] for each in found] == [each["steps"] for each in expected]
    for mine, other in zip(found, expected, strict=True):
        for role, trained in other["trained"].items():
            for name, values in trained.items():
                assert torch.equal(mine["trained"][role][name], values), (role, name)
    return True


@pytest.mark.parametrize("failing", ["forward 2", "backward 2", "backward 5", "scoring 1"])
@pytest.mark.parametrize("size", [1, 2])
def test_x(run, size, failing):
    found = run(size, failing=(failing,), on_rank=size - 1)
    assert same(found, run(size))
