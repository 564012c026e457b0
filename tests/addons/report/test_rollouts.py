"""``dschat-lora rollouts``: what is found in kept responses."""

import gzip
import json

import pytest

from dschat_lora.__main__ import main
from dschat_lora.addons.report.rollouts import show_rollouts
from dschat_lora.report.rollout_file import FILE, as_member
from helpers.attacks import ESCAPES, has_control, seen
from helpers.kept_rollouts import kept, row


@pytest.fixture
def run(tmp_path):
    """A run of three iterations on three prompts."""
    log = kept(tmp_path)
    for iteration, shift in ((1, 0.0), (2, 1.0), (3, 2.0)):
        rows = [
            row(iteration, "sums: 1 + 1?", f"two {iteration}", reward=shift),
            row(iteration, "sums: 2 + 2?", f"four {iteration}", reward=5 - shift / 4),
            row(iteration, "name?", f"Tom {iteration}", reward=None),
        ]
        log.append(as_member(rows))
    return tmp_path


@pytest.fixture
def looked(run, capsys, monkeypatch):
    """``looked(*argv)``: what the verb prints."""

    def look(*argv, code=None):
        monkeypatch.setattr("sys.argv", ["dschat-lora", "rollouts", *map(str, argv)])
        if code is None:
            main()
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        return capsys.readouterr().err

    return look


def named(rows):
    return [each["response"] for each in rows]


@pytest.mark.smoke
def test_selections_are_one_json_object(looked, run):
    found = json.loads(looked(run, "--best", 2, "--worst", 1, "--changed", 1, "--json"))
    assert named(found["best"]) == ["four 1", "four 2"]
    assert named(found["worst"]) == ["two 1"]
    assert named(found["changed"]) == ["two 1", "two 3"]
    assert (found["responses"], found["prompts"], found["iterations"]) == (9, 3, 3)
    assert (found["first_reward"], found["last_reward"]) == (2.5, 3.25)
    assert set(found["best"][0]) == {
        *("iteration", "prompt", "response", "ended", "rewards"),
        *("reward", "advantage", "kl", "length"),
    }


def test_text_filters_every_selection(looked, run):
    found = json.loads(looked(run, "--best", 9, "--contains", "two", "--json"))
    assert named(found["best"]) == ["two 3", "two 2", "two 1"]
    found = json.loads(looked(run, "--contains", "Tom", "--limit", 2, "--json"))
    assert named(found["contains"]) == ["Tom 1", "Tom 2"]


def test_a_prompt_is_shown_in_the_order_of_iterations(looked, run):
    found = json.loads(looked(run, "--prompt", "1 + 1", "--json"))
    assert named(found["prompt"]) == ["two 1", "two 2", "two 3"]
    found = json.loads(looked(run, "--prompt", "1 + 1", "--limit", 2, "--json"))
    assert named(found["prompt"]) == ["two 1", "two 3"]


def test_best_and_worst_are_shown_where_nothing_is_asked_for(looked, run):
    said = looked(run)
    assert said.startswith("9 responses to 3 prompts in 3 iterations; mean reward 2.5 in the first")
    assert "best:\n  iteration 1  reward 5  advantage 0.5  kl 0.25  3 tokens\n" in said
    assert "worst:\n  iteration 1  reward 0 " in said
    assert "Tom" not in said


def test_episodes_of_agents_are_shown_with_all_sequences_and_why_they_failed(looked, tmp_path):
    log = kept(tmp_path)
    beside = [{"prompt": "helper?", "response": "it helps"}]
    log.append(as_member([row(1, "asked", "done", earlier_sequences=beside)]))
    log.append(
        as_member([row(2, "lost", "", None, ended=False, failure="timed out after 3 seconds")])
    )
    said = looked(tmp_path, "--best", 1, "--failed", 2)
    assert "    'helper?'\n    -> 'it helps'\n    'asked'\n    -> 'done'\nfailed:\n" in said
    assert "iteration 2  reward -  advantage 0.5  kl 0.25  3 tokens, timed out after" in said
    log.append(as_member([row(3, earlier_sequences=["text"])]))
    assert "holds no responses of a run" in looked(tmp_path, "--best", 1, code=2)


def test_a_directory_without_responses_is_refused_in_one_line(looked, tmp_path):
    said = looked(tmp_path / "nothing", code=2)
    assert said.startswith("error: ")
    assert "--log_rollouts" in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE).write_bytes(gzip.compress(b"[1]\n"))
    assert "holds no responses of a run" in looked(tmp_path / "other", code=2)
    assert "--best must be >= 0, got -1" in looked(tmp_path, "--best", "-1", code=2)


def test_control_characters_of_responses_do_not_reach_the_terminal(capsys, tmp_path):
    row = {"iteration": 1, "prompt": ESCAPES, "response": ESCAPES, "rewards": {ESCAPES: 1}}
    row |= {"reward": 1, "advantage": 0, "kl": 0, "length": 1}
    (tmp_path / "rollouts.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    for in_json in (False, True):
        show_rollouts(tmp_path, json=in_json, best=1, contains=None, prompt=None)
        words = seen(capsys)
        assert "[2J" in words
        assert not has_control(words)
