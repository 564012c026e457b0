"""Runs of step 3 with an agent, in this process's ranks: the same as with an environment."""

import json
import shutil
from functools import cache
from types import SimpleNamespace

import pytest

from addons.environments.test_environment_runs import weights_of, without_times
from dschat_lora.addons.report.rollouts import read_rollouts
from helpers.rlhf_course import write_inputs, write_turns_template

pytestmark = pytest.mark.stage

ARGV = """
    --max_prompt_seq_len 16 --max_answer_seq_len 48 --max_steps 4 --num_train_epochs 9
    --eval_prompts 2 --eval_ratio 0 --actor_lora_learning_rate 5e-3 --stop_tokens e i n t a o s r
    --per_device_training_batch_size 4 --algorithm grpo --num_generations 2
    --save_interval 2 --save_total_limit 0
""".split()
ENVIRONMENT = (
    "--environment helpers.rlhf_course:ask_on --reward_function helpers.rlhf_course:vowels"
)
BRANCHES = "--agent helpers.rlhf_course:branches"
KINDS = {
    "environment": (1, ENVIRONMENT),
    "agent": (1, "--agent helpers.rlhf_course:asks_on"),
    "branches": (1, BRANCHES),
    "resumed": (1, BRANCHES),
    "ranks": (2, f"{BRANCHES} --gradient_accumulation_steps 1 --per_device_training_batch_size 2"),
}


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """``runs(kind)``: lines of metrics and rollouts, and the directory."""
    home = tmp_path_factory.mktemp("agents")
    inputs = [*write_inputs(home, chat=True), "--chat_template", home / "turns.jinja"]
    write_turns_template(home / "turns.jinja")

    @cache
    def run(kind):
        size, options = KINDS[kind]
        out = home / kind
        argv = [*ARGV, *options.split(), *inputs, "--output_dir", out]
        argv += ["--per_device_generation_batch_size", 8 // size]
        if kind == "resumed":
            run("branches")
            argv += ["--resume_from_checkpoint", home / "branches/checkpoints/step-00000002"]
        report, *_ = ranks(size).run("helpers.rlhf_course:train_rlhf", argv=list(map(str, argv)))
        lines = [without_times(line) for line in json.loads(report["lines"])]
        return SimpleNamespace(lines=lines, rows=read_rollouts(out), out=out)

    yield run
    shutil.rmtree(home)


def of_agents(name):
    return name in ("sequences", "turns", "environment_tokens") or name.endswith("_episodes")


def plain(line):
    """Without what only one of the two says, the name of the reward, and greedy episodes.

    Those do not end: an environment's is cut off, an agent's is refused a longer prompt.
    """
    skipped = ("reward/", "greedy")
    return {n: v for n, v in line.items() if not (of_agents(n) or any(s in n for s in skipped))}


def differences(own, other):
    """(line, name, values) of what two runs say differently."""
    pairs = [*enumerate(zip(own, other, strict=True))]
    names = [(n, name, a, b) for n, (a, b) in pairs for name in {**a, **b}]
    outcome = [(n, name, a.get(name), b.get(name)) for n, name, a, b in names]
    return [each for each in outcome if each[2] != each[3]]


@pytest.mark.thorough
def test_an_agent_is_the_environment_that_says_the_same_digit_for_digit(runs):
    agent, environment = runs("agent"), runs("environment")
    assert not differences(map(plain, agent.lines), map(plain, environment.lines))
    assert weights_of(agent.out) == weights_of(environment.out)
    trained = [line for line in agent.lines if line["kind"] == "train"]
    assert {line["eos_rate"] for line in trained} == {1.0}
    assert max(line["turns"] for line in trained) > 1.2
    assert {line["sequences"] for line in trained} == {1.0}
    assert {line["failed_episodes"] for line in trained} == {0}
    for own, other in zip(agent.rows, environment.rows, strict=True):
        assert own["response"] == other["response"]
        assert own["reward"] == other["reward"]
        assert own.get("messages") == other.get("messages")


@pytest.mark.thorough
def test_a_run_of_agents_that_branch_and_fail_goes_on_bit_for_bit(runs):
    whole, resumed = runs("branches"), runs("resumed")
    later = [line for line in whole.lines if line["step"] > 2]
    assert later
    assert not differences([line for line in resumed.lines if line["step"] > 2], later)
    assert weights_of(resumed.out) == weights_of(whole.out)
    trained = [line for line in whole.lines if line["kind"] == "train"]
    assert max(line["failed_episodes"] for line in trained) > 0
    for line in trained:
        # The question, the helper's two answers, and the history that was rewritten.
        assert (line["sequences"], line["logged/found"] > 1) == (4.0, True)
        assert line["dropped"] == line["failed_episodes"]
        # What was drawn is what is learnt from: the decode loop's log-probabilities agree.
        assert line["sampler_error_max"] < 1e-4


@pytest.mark.thorough
def test_two_processes_play_the_episodes_of_one(runs):
    one, two = runs("branches"), runs("ranks")
    for own, other in zip(one.lines, two.lines, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            if isinstance(value, float) and name != "sampler_error_max":
                assert other[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert [row["response"] for row in one.rows] == [row["response"] for row in two.rows]
