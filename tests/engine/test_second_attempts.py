"""Step 3 on a GPU whose memory runs out beside what decoding keeps: the run is the same."""

import json
from functools import cache

import pytest
import torch

from helpers.addons import with_addon
from helpers.rlhf_course import save_family, write_prompts, write_texts
from helpers.spread import ALL

pytestmark = pytest.mark.stage

# Two iterations of eight responses, of one step each: actor and critic in two micro-batches, then
# two of text.
OPTIONS = """
    --max_prompt_seq_len 14 --max_answer_seq_len 4 --max_steps 2 --eval_prompts 0 --eval_ratio 0
    --actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3 --save_interval 0
    --save_minutes 0 --gradient_accumulation_steps 2 --unsup_coef 0.5 --num_warmup_steps 0
""".split()
# The old outputs of a single batch are those of the update's own pass.
ONE_BATCH = ("--gradient_accumulation_steps", "1")


@pytest.fixture(scope="module")
def run(tmp_path_factory, ranks):
    """``run(size, *options, **planted)``: every rank's report; see ``train_full``."""
    home = tmp_path_factory.mktemp("full")
    models = save_family("opt", home / "opt")
    write_prompts(home / "prompts.jsonl", 16)
    write_texts(home / "texts.jsonl", 9)

    @cache
    def call(size, *options, **planted):
        rows = 8 // size
        micro = rows if options == ONE_BATCH else rows // 2
        argv = [
            *("--actor_model_name_or_path", models["actor"]),
            *("--critic_model_name_or_path", models["reward"]),
            *("--data_path", home / "prompts.jsonl", *OPTIONS),
            *("--unsupervised_dataset_name", home / "texts.jsonl"),
            *("--per_device_generation_batch_size", rows),
            *("--per_device_training_batch_size", micro, *options),
            *("--output_dir", home / f"{size} {options} {planted}"),
        ]
        argv = list(map(str, argv))
        return ranks(size).run("helpers.full_gpu:train_full", argv=argv, **planted)

    return call


def events(report):
    lines = json.loads(report["lines"])
    return [line["message"] for line in lines if line["kind"] == "event"]


@pytest.mark.parametrize(
    ("size", "options", "failing"),
    [
        (1, (), "backward 5"),  # of the text, whose window must not be another one
        # Of the critic, when ranks have shared old outputs and summed the losses.
        (2, ONE_BATCH, "backward 1"),
        *[
            (size, options, failing)
            for size, options in ((1, ()), (2, ()), (1, ONE_BATCH), (2, ONE_BATCH))
            for failing in ("scoring 1", "forward 0", "forward 1", "backward 0", "backward 3")
        ]
        * ALL,
        *[(size, ("--zero_stage", stage), "forward 3") for size, stage in ((2, "1"), (2, "2"))]
        * ALL,
    ],
)
def test_a_pass_that_one_rank_makes_again_changes_nothing(run, size, options, failing):
    reports = run(size, *options, failing=(failing,), on_rank=size - 1)
    expected = run(size, *options)
    kind = failing.split()[0]
    assert reports[-1]["passes"][kind] > expected[-1]["passes"][kind]
    for mine, other in zip(reports, expected, strict=True):
        assert mine["steps"] == other["steps"]
        assert mine["texts"] == other["texts"]
        for role, trained in other["trained"].items():
            for name, values in trained.items():
                assert torch.equal(mine["trained"][role][name], values), (role, name)
    assert [each.split(":")[0] for each in events(reports[0])] == [
        "the GPU ran out of memory for training next to the KV cache, which was freed; from here "
        "on it is freed after every rollout, as with --release_inference_cache, which does not "
        "change results"
    ]
    assert events(expected[0]) == []


def said(run, *options, failing, **planted):
    """The line that ends a run in one process, and how often passes were made."""
    (report,) = run(1, *options, failing=failing, **planted)
    assert report["code"] == 1
    assert report["said"].startswith("error: out of GPU memory while ")
    return report["said"], report["passes"]


@with_addon("planning")
def test_where_a_second_attempt_fails_too_a_line_says_what_to_lower(run):
    line, passes = said(run, failing=("backward 2", "backward 3"))
    assert passes["backward"] == 3
    assert "while training" in line
    assert "(--per_device_training_batch_size 2 --gradient_accumulation_steps 4)" in line
    assert "--release_inference_cache" not in line


@with_addon("planning")
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "failing", "keeps"),
    [
        (("--zero_stage", "3"), "forward 0", True),
        (("--zero_stage", "2", "--offload"), "backward 1", True),
        ((), "forward 0", False),  # there is nothing to free
    ],
)
def test_what_cannot_be_made_again_ends_at_once(run, options, failing, keeps):
    _, passes = said(run, *options, failing=(failing,), keeps=keeps)
    kind, number = failing.split()
    assert passes[kind] == int(number)
