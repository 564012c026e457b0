"""Runs of step 3 with players of a user's, in one process and in two."""

import json
import shutil
from types import SimpleNamespace

import pytest

from helpers.rlhf_course import write_inputs
from helpers.step1 import rollouts

pytestmark = pytest.mark.stage

ARGV = """
    --max_prompt_seq_len 14 --max_answer_seq_len 12 --max_steps 4 --num_train_epochs 9
    --eval_prompts 2 --eval_ratio 0 --actor_lora_learning_rate 5e-3 --stop_tokens e i n t a o
    --algorithm grpo --num_generations 2 --generation_batches 2 --log_rollouts 99
""".split()
PLAYERS = {"BetterOfTwo": "", "Hint": "--reward_function helpers.rlhf_course:vowels"}


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory):
    """``runs[player, processes]``: lines of metrics, rows of rollouts, and tokens by rollout."""
    home = tmp_path_factory.mktemp("players")
    inputs, outcome = write_inputs(home), {}
    for player, options in PLAYERS.items():
        for size in (1, 2):
            out = home / f"{player}{size}"
            argv = [*ARGV, *options.split(), *inputs, "--output_dir", out]
            argv += ["--environment", f"helpers.players:{player}"]
            for name in ("generation", "training"):
                argv += [f"--per_device_{name}_batch_size", 8 // size]
            report, *_ = ranks(size).run("helpers.rlhf_course:train_rlhf", argv=[*map(str, argv)])
            lines = json.loads(report["lines"])
            outcome[player, size] = SimpleNamespace(
                trains=[line for line in lines if line["kind"] == "train"],
                rows=rollouts(out),
                texts=report["texts"],
            )
    yield outcome
    shutil.rmtree(home)


@pytest.mark.parametrize("player", PLAYERS)
def test_rollouts_of_a_player_are_the_same_in_one_process_and_in_two(runs, player):
    one, two = runs[player, 1], runs[player, 2]
    assert len(one.rows) == 2 * 16
    assert one.texts == two.texts
    assert [row["rewards"] for row in one.rows] == [row["rewards"] for row in two.rows]


@pytest.mark.parametrize("player", PLAYERS)
def test_log_probabilities_of_what_a_player_drew_are_those_of_the_policy(runs, player):
    for line in runs[player, 1].trains:
        assert line["sampler_error"] < 1e-4
        assert line["ratio_error"] < 1e-4


def test_a_player_may_ask_twice_and_score_by_its_own_rule(runs):
    run = runs["BetterOfTwo", 1]
    tokens = [each for rollout in run.texts if len(rollout) == 16 for each in rollout]
    for row, own in zip(run.rows, tokens, strict=True):
        assert row["rewards"] == {"BetterOfTwo": pytest.approx(len(set(own)) / len(own))}
    for line in run.trains:
        own = [r["reward"] for r in run.rows if r["iteration"] == line["iteration"]]
        assert line["reward/BetterOfTwo"] == pytest.approx(sum(own) / len(own))


def test_of_a_hint_between_two_turns_nothing_is_learnt(runs):
    run = runs["Hint", 1]
    tokens = [each for rollout in run.texts if len(rollout) == 16 for each in rollout]
    read = [len(own) - row["length"] for own, row in zip(tokens, run.rows, strict=True)]
    assert {0, 2} <= {*read} <= {0, 2, 4}  # the two letters of each hint
    for row, count in zip(run.rows, read, strict=True):
        assert row["response"].count("ab") >= count // 2
    for line in run.trains:
        assert line["environment_tokens"] > 0
        assert line["turns"] > 1
        assert set(run.rows[0]["rewards"]) == {"vowels"}
