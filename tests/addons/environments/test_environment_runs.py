"""Runs of step 3 with an environment, in this process's ranks: exact where nothing may change."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest

from dschat_lora.report.rollout_file import FILE
from helpers.rlhf_course import save_family, write_inputs, write_turns_template
from helpers.step1 import rollouts

pytestmark = pytest.mark.stage

ARGV = """
    --max_prompt_seq_len 14 --max_answer_seq_len 12 --max_steps 4 --num_train_epochs 9
    --eval_prompts 2 --eval_ratio 0 --actor_lora_learning_rate 5e-3 --critic_lora_learning_rate 5e-3
    --reward_function helpers.rlhf_course:vowels --stop_tokens e i n t
    --per_device_generation_batch_size 8 --per_device_training_batch_size 4
    --save_interval 2 --save_total_limit 0
""".split()
KINDS = {
    "none": "",
    "silent": "--environment helpers.rlhf_course:end_at_once --max_turns 2",
    "turns": "--environment helpers.rlhf_course:ask_again --max_turns 3",
    "resumed": "--environment helpers.rlhf_course:ask_again --max_turns 3",
    "objects": "--environment helpers.rlhf_course:AskAgain --max_turns 3",
    "resumed objects": "--environment helpers.rlhf_course:AskAgain --max_turns 3",
}


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """``runs[kind]``: lines of metrics and rollouts, and the directory."""
    home = tmp_path_factory.mktemp("environment")
    inputs = [*write_inputs(home), "--critic_model_name_or_path", home / "opt" / "reward"]
    inputs += ["--chat_template", home / "turns.jinja"]
    write_turns_template(home / "turns.jinja")
    outcome = {}
    for kind, options in KINDS.items():
        out = home / kind
        argv = [*ARGV, *options.split(), *inputs, "--output_dir", out]
        if kind.startswith("resumed"):
            earlier = home / ("turns" if kind == "resumed" else "objects")
            argv += ["--resume_from_checkpoint", earlier / "checkpoints" / "step-00000002"]
        (report,) = ranks(1).run("helpers.rlhf_course:train_rlhf", argv=list(map(str, argv)))
        lines = [without_times(line) for line in json.loads(report["lines"])]
        outcome[kind] = SimpleNamespace(lines=lines, rows=rollouts(out), out=out)
    yield outcome
    shutil.rmtree(home)


def without_times(line):
    # Times, and rates by them.
    return {
        name: value
        for name, value in line.items()
        if name not in ("time", "mfu", "tflops_deepspeed_chat", "peak_memory_bytes")
        and not name.endswith(("_seconds", "_per_second", "_per_device"))
    }


def weights_of(out):
    files = sorted((out / "actor" / "adapter").glob("*.safetensors"))
    assert files
    return [file.read_bytes() for file in files]


def test_an_environment_that_ends_at_once_is_the_run_without_one_digit_for_digit(runs):
    assert runs["silent"].lines == runs["none"].lines
    assert len(runs["none"].lines) > 3
    assert (runs["silent"].out / FILE).read_bytes() == (runs["none"].out / FILE).read_bytes()
    assert weights_of(runs["silent"].out) == weights_of(runs["none"].out)


def test_rollouts_keep_the_messages_of_all_turns(runs):
    rows = runs["turns"].rows
    several = [row for row in rows if "messages" in row]
    assert 0 < len(several) < len(rows)
    turns = [
        sum(m["role"] == "assistant" for m in row["messages"]) if "messages" in row else 1
        for row in rows
    ]
    assert max(turns) <= 3
    trains = [line for line in runs["turns"].lines if line["kind"] == "train"]
    for line in trains:
        own = [
            n for n, row in zip(turns, rows, strict=True) if row["iteration"] == line["iteration"]
        ]
        assert line["turns"] == pytest.approx(sum(own) / len(own))
    for row in several:
        assert [m["role"] for m in row["messages"]][0::1][-1] == "assistant"
        read = "".join(f"?{m['content']}:" for m in row["messages"][1:] if m["role"] == "user")
        assert all(part in row["response"] for part in read.split(":") if part)


def test_objects_of_a_class_play_the_same_episodes_digit_for_digit(runs):
    def plain(line):
        return {name: value for name, value in line.items() if "AskAgain" not in name}

    objects, function = runs["objects"], runs["turns"]
    assert list(map(plain, objects.lines)) == function.lines
    assert {line.get("reward/AskAgain", 0.0) for line in objects.lines} == {0.0}
    for row in objects.rows:
        assert row["rewards"].pop("AskAgain") in (0.0, None)
    assert objects.rows == function.rows
    assert weights_of(objects.out) == weights_of(function.out)


@pytest.mark.parametrize(
    ("first", "second"), [("turns", "resumed"), ("objects", "resumed objects")]
)
def test_a_run_with_an_environment_goes_on_bit_for_bit(runs, first, second):
    whole, resumed = runs[first], runs[second]
    later = [line for line in whole.lines if line["step"] > 2]
    assert later
    assert [line for line in resumed.lines if line["step"] > 2] == later
    assert (resumed.out / FILE).read_bytes() == (whole.out / FILE).read_bytes()
    assert weights_of(resumed.out) == weights_of(whole.out)


def test_an_environment_of_gymnasium_gives_prompts_and_rewards(ranks, tmp_path):
    pytest.importorskip("gymnasium")
    models = save_family("opt", tmp_path / "opt", layers=1)
    argv = """
        --environment gymnasium:addons.environments.gym_envs:Vowels-v0 --num_prompts 12
        --algorithm grpo --num_generations 4 --max_prompt_seq_len 48 --max_steps 2
        --max_answer_seq_len 8
        --per_device_generation_batch_size 8 --per_device_training_batch_size 8
        --eval_prompts 2 --actor_lora_learning_rate 5e-3 --stop_tokens i t
    """.split()
    argv += ["--output_dir", tmp_path / "out", "--data_output_path", tmp_path / "data"]
    argv += ["--actor_model_name_or_path", models["actor"]]
    (report,) = ranks(1).run("helpers.rlhf_course:train_rlhf", argv=list(map(str, argv)))
    rows, lines = rollouts(tmp_path / "out"), json.loads(report["lines"])
    assert len(rows) == 16
    assert all(re.search("the (cat|dog|hen) and (cat|dog|hen)", row["prompt"]) for row in rows)
    assert len({row["prompt"] for row in rows}) > 1
    assert {row["ended"] for row in rows} == {True, False}
    for row in rows:
        # The environment never sees an answer that is cut off.
        seen = row["response"] if row["ended"] else ""
        assert row["rewards"]["Vowels-v0"] == sum(seen.count(each) for each in "aeiou")
    for line in lines:
        if line["kind"] == "train":
            own = [r["rewards"]["Vowels-v0"] for r in rows if r["iteration"] == line["iteration"]]
            assert line["reward/Vowels-v0"] == pytest.approx(sum(own) / len(own))
