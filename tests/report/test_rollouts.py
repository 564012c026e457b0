"""Kept rollouts: a gzip file at any time, cut back on resume, and what is found in it."""

import gzip
import json

import pytest

from dschat_lora.__main__ import main
from dschat_lora.report.rollouts import FILE, as_member, open_rollouts, read_rollouts


class Log:
    """As much of a run's log as is asked for."""

    def __init__(self):
        self.failure, self.said = None, []

    def say(self, text):
        self.said.append(text)


def row(iteration, prompt="p", response="r", reward=0.0, **more):
    return {
        "iteration": iteration,
        "prompt": prompt,
        "response": response,
        "ended": True,
        "rewards": {"f": reward},
        "reward": reward,
        "advantage": 0.5,
        "kl": 0.25,
        "length": 3,
        **more,
    }


def kept(directory, *iterations, source=None, log=None, active=True):
    found = open_rollouts(directory, log or Log(), active=active, source=source)
    for iteration in iterations:
        found.append(as_member([row(iteration, response=f"{iteration}-{n}") for n in range(2)]))
    return found


def responses(directory):
    return [each["response"] for each in read_rollouts(directory)]


def test_every_iteration_is_a_member_and_the_whole_a_gzip_file_at_any_time(tmp_path):
    log = kept(tmp_path)
    for iteration in range(3):
        log.append(as_member([row(iteration, prompt="Grüße\n")]))
        with gzip.open(tmp_path / FILE, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        assert rows == [row(n, prompt="Grüße\n") for n in range(iteration + 1)]
    assert read_rollouts(tmp_path) == rows


def test_a_new_run_begins_a_new_file(tmp_path):
    kept(tmp_path, 1, 2, 3)
    kept(tmp_path, 9)
    assert responses(tmp_path) == ["9-0", "9-1"]


def test_a_resumed_run_has_the_file_of_one_that_was_never_stopped(tmp_path):
    (tmp_path / "whole").mkdir()
    kept(tmp_path / "whole", 1, 2, 3, 4)
    state = kept(tmp_path, 1, 2).state()
    kept(tmp_path, 1, 2, 7, 8)
    resumed = open_rollouts(tmp_path, Log(), active=True, source=None)
    resumed.restore(state)
    assert responses(tmp_path) == ["1-0", "1-1", "2-0", "2-1"]
    for iteration in (3, 4):
        resumed.append(as_member([row(iteration, response=f"{iteration}-{n}") for n in range(2)]))
    assert (tmp_path / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


def test_a_run_that_goes_on_elsewhere_takes_the_earlier_responses_along(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    state = kept(old, 1, 2).state()
    kept(old, 1, 2, 3)
    log = open_rollouts(new, Log(), active=True, source=old)
    log.restore(state)
    log.append(as_member([row(5, response="5-0")]))
    assert responses(new) == ["1-0", "1-1", "2-0", "2-1", "5-0"]
    assert responses(old)[-1] == "3-1"


def test_what_a_crash_cut_off_is_left_out_and_no_later_member_is_lost(tmp_path):
    state = kept(tmp_path, 1, 2).state()
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:-5])
    assert responses(tmp_path) == ["1-0", "1-1"]
    log = open_rollouts(tmp_path, notes := Log(), active=True, source=None)
    log.restore(state)
    log.append(as_member([row(3, response="3-0")]))
    assert responses(tmp_path) == ["1-0", "1-1", "3-0"]
    assert "had lost its end" in notes.said[0]


def test_only_the_first_rank_writes_and_numbers_that_are_not_finite_are_text(tmp_path):
    kept(tmp_path, 1, active=False).restore({"bytes": 7})
    assert not (tmp_path / FILE).exists()
    kept(tmp_path).append(as_member([row(1, kl=float("nan"))]))
    assert read_rollouts(tmp_path)[0]["kl"] == "nan"


def test_a_failure_of_the_disk_is_the_logs(tmp_path):
    log = Log()
    kept(tmp_path / "gone", 1, log=log)
    assert isinstance(log.failure, OSError)
    assert FILE in str(log.failure)


# ---------------------------------------------------------------------------- the verb


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
