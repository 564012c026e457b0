"""DAPO with several reward functions and turns: one fails, is mended, and the run is the same."""

import json
from types import SimpleNamespace

import pytest

from dschat_lora.report.rollout_file import FILE
from helpers.addons import of_addon
from helpers.launcher import ROOT
from helpers.rlhf_course import save_family, write_prompts, write_turns_template
from helpers.step1 import metrics, rollouts
from stages.test_step3_resume import lines_but_times, weights_of

pytestmark = pytest.mark.stage

STEP3 = ROOT / "training" / "step3_rlhf" / "main.py"
FUNCTIONS = '''
"""Reward functions of a user; one fails for as long as there is a file "broken"."""

import asyncio
import os

calls = []


def even(completions, number, **kwargs):
    """In TRL's signature, with a column of the data."""
    calls.append(1)
    if os.path.exists("broken") and len(calls) > 17:
        raise KeyError("the server is gone")
    return [float(len(text) % 2 == n % 2) for text, n in zip(completions, number)]


def again(responses):
    """An environment."""
    return [{"role": "user", "content": "x"} if len(text) % 3 == 0 else None for text in responses]


async def short(response, token_ids):
    await asyncio.sleep(0)
    return -0.125 * (len(token_ids) > 4)
'''
ARGV = """
    --actor_model_name_or_path opt/actor --data_path prompts.jsonl --eval_prompts 0
    --max_prompt_seq_len 14 --max_answer_seq_len 12 --num_generations 2
    --chat_template turns.jinja --stop_tokens e i n t
    --per_device_generation_batch_size 8 --per_device_training_batch_size 4
    --actor_lora_learning_rate 5e-3 --algorithm dapo --reward_batch group
    --no-mask_truncated_completions --soft_overlong_tokens 2
    --reward_function my_rewards:even my_rewards:short --reward_weights 1 0.5
    --num_train_epochs 2 --save_interval 100 --output_dir out --seed 2
""".split()
PLAYED = bool(of_addon("environments.addon"))
if PLAYED:
    ARGV += ["--environment", "my_rewards:again", "--max_turns", "3"]


@pytest.fixture(scope="module")
def runs(launcher, tmp_path_factory):
    """The run that nothing disturbs, one whose function fails, and how the latter went on."""
    ended = SimpleNamespace()
    model = tmp_path_factory.mktemp("model")
    save_family("opt", model, layers=1)

    def run(home, *more):
        running = launcher.start([*ARGV, *more], home, script=STEP3)
        return SimpleNamespace(codes=running.wait(), out=running.out(), err=running.err())

    for name in ("whole", "broken"):
        home = tmp_path_factory.mktemp(name)
        (home / "opt").symlink_to(model)
        write_prompts(home / "prompts.jsonl", 16)
        write_turns_template(home / "turns.jinja")
        (home / "my_rewards.py").write_text(FUNCTIONS, encoding="utf-8")
        if name == "broken":
            (home / "broken").touch()
        setattr(ended, name, run(home))
        setattr(ended, f"{name}_out", home / "out")
    ended.rows = rollouts(ended.broken_out)
    ended.saved = [each.name for each in (ended.broken_out / "checkpoints").iterdir()]
    (ended.broken_out.parent / "broken").unlink()
    ended.resumed = run(ended.broken_out.parent, "--resume_from_checkpoint", "latest")
    return ended


def test_a_function_that_fails_ends_the_run_with_its_traceback_and_the_last_iteration(runs):
    assert set(runs.broken.codes) == {1}, runs.broken.err
    assert 'raise KeyError("the server is gone")' in runs.broken.err
    assert "stopped by a reward function that failed after step" in runs.broken.out
    assert (
        "/main.py --output_dir out --resume_from_checkpoint latest --reward_function "
        "my_rewards:even my_rewards:short"
    ) in runs.broken.out
    trained = {row["iteration"] for row in runs.rows}
    steps = sum(line["updates"] for line in lines_but_times(runs.whole_out)[: len(trained)])
    assert runs.saved == [f"step-{steps:08d}"]


def test_it_goes_on_as_if_nothing_had_been(runs):
    assert not any(runs.whole.codes), runs.whole.err
    assert not any(runs.resumed.codes), runs.resumed.err
    assert lines_but_times(runs.broken_out) == lines_but_times(runs.whole_out)
    assert (runs.broken_out / FILE).read_bytes() == (runs.whole_out / FILE).read_bytes()
    assert weights_of(runs.broken_out / "actor") == weights_of(runs.whole_out / "actor")


def test_kept_responses_are_those_that_the_metrics_are_of(runs):
    rows, lines = rollouts(runs.whole_out), metrics(runs.whole_out, "train")
    data = (runs.whole_out.parent / "prompts.jsonl").read_text().splitlines()
    numbers = {row["prompt"]: row["number"] for row in map(json.loads, data)}
    assert sum(line["resampled_prompts"] for line in lines) > 0
    for line in lines:
        own = [row for row in rows if row["iteration"] == line["iteration"]]
        assert len(own) == line["samples"]
        for name in ("even", "short"):
            mean = sum(row["rewards"][name] for row in own) / len(own)
            assert line[f"reward/{name}"] == pytest.approx(mean)
        assert line["reward"] == pytest.approx(sum(row["reward"] for row in own) / len(own))
        assert line["kl"] == pytest.approx(sum(row["kl"] for row in own) / len(own), abs=1e-6)
        pairs = list(zip(own[::2], own[1::2], strict=True))
        assert line["equal_prompts"] == sum(a["reward"] == b["reward"] for a, b in pairs)
    assert any("messages" in row for row in rows) == PLAYED
    for row in rows:
        assert row["reward"] == row["rewards"]["even"] + 0.5 * row["rewards"]["short"]
        if "messages" not in row:
            assert row["rewards"]["short"] == -0.125 * (row["length"] > 4)
        last = row["messages"][-1]["content"] if "messages" in row else row["response"]
        right = len(last) % 2 == numbers[row["prompt"]] % 2
        assert row["rewards"]["even"] == float(right)
