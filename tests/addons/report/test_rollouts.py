"""``dschat-lora rollouts``: what is found in kept responses."""

import gzip
import json

import pytest

from dschat_lora.__main__ import main
from dschat_lora.addons.report.rollouts import RolloutQuery, read_rollouts, show_rollouts
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
    """``looked(*argv, home=run)``: what the verb prints, with ``--json`` as an object."""

    def look(*argv, home=run):
        words = ["dschat-lora", "rollouts", home, *argv]
        monkeypatch.setattr("sys.argv", [str(each) for each in words])
        main()
        said = capsys.readouterr().out
        return json.loads(said) if "--json" in argv else said

    return look


def named(rows):
    return [each["response"] for each in rows]


@pytest.mark.smoke
def test_selections_are_one_json_object(looked):
    chosen = looked("--best", 2, "--worst", 1, "--changed", 1, "--json")
    assert named(chosen["best"]) == ["four 1", "four 2"]
    assert named(chosen["worst"]) == ["two 1"]
    assert named(chosen["changed"]) == ["two 1", "two 3"]
    assert (chosen["responses"], chosen["prompts"], chosen["iterations"]) == (9, 3, 3)
    assert (chosen["first_reward"], chosen["last_reward"]) == (2.5, 3.25)
    assert chosen["best"][0].keys() == row(1).keys()


@pytest.mark.parametrize(
    ("argv", "selection", "responses"),
    [
        # Text filters every selection.
        (("--best", 9, "--contains", "two"), "best", ["two 3", "two 2", "two 1"]),
        (("--contains", "Tom", "--limit", 2), "contains", ["Tom 1", "Tom 2"]),
        # A prompt is shown in the order of iterations, the first and the last among them.
        (("--prompt", "1 + 1"), "prompt", ["two 1", "two 2", "two 3"]),
        (("--prompt", "1 + 1", "--limit", 2), "prompt", ["two 1", "two 3"]),
    ],
)
def test_responses_are_found_by_text(looked, argv, selection, responses):
    assert named(looked(*argv, "--json")[selection]) == responses


def test_best_and_worst_are_shown_where_nothing_is_asked_for(looked):
    said = looked()
    assert said.startswith("9 responses to 3 prompts in 3 iterations; mean reward 2.5 in the first")
    assert "best:\n  iteration 1, reward 5, advantage 0.5, KL 0.25, 3 tokens\n" in said
    assert "worst:\n  iteration 1, reward 0, " in said
    assert "Tom" not in said


def test_episodes_of_agents_are_shown_with_all_sequences_and_why_they_failed(looked, tmp_path):
    (tmp_path / "agents").mkdir()
    log = kept(tmp_path / "agents")
    beside = [{"prompt": "helper?", "response": "it helps"}]
    log.append(as_member([row(1, "asked", "done", earlier_sequences=beside)]))
    lost = row(2, "lost", "", None, ended=False, failure="timed out after 3 seconds")
    log.append(as_member([lost]))
    said = looked("--best", 1, "--failed", 2, home=tmp_path / "agents")
    assert "    helper?\n    -> it helps\n    asked\n    -> done\nfailed:\n" in said
    assert "iteration 2, reward -, advantage 0.5, KL 0.25, 3 tokens, timed out after" in said
    log.append(as_member([row(3, earlier_sequences=["text"])]))
    with pytest.raises(ValueError, match="holds no responses of a run"):
        read_rollouts(tmp_path / "agents")


@pytest.mark.parametrize("in_json", [False, True])
def test_control_characters_of_responses_do_not_reach_the_terminal(capsys, tmp_path, in_json):
    hostile = row(1, ESCAPES, ESCAPES) | {"rewards": {ESCAPES: 1}}
    (tmp_path / FILE).write_bytes(gzip.compress(json.dumps(hostile).encode() + b"\n"))
    show_rollouts(tmp_path, RolloutQuery(best=1), json=in_json)
    words = seen(capsys)
    assert "[2J" in words
    assert not has_control(words)
