"""Kept rollouts: a gzip file at any time, cut back on resume."""

import gzip
import json

from dschat_lora.report.rollout_file import FILE, as_member, open_rollouts
from helpers.kept_rollouts import Log, kept, row
from helpers.step1 import rollouts


def responses(directory):
    return [each["response"] for each in rollouts(directory)]


def test_every_iteration_is_a_member_and_the_whole_a_gzip_file_at_any_time(tmp_path):
    log = kept(tmp_path)
    for iteration in range(3):
        log.append(as_member([row(iteration, prompt="Grüße\n")]))
        with gzip.open(tmp_path / FILE, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        assert rows == [row(n, prompt="Grüße\n") for n in range(iteration + 1)]
    assert rollouts(tmp_path) == rows


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
    assert rollouts(tmp_path)[0]["kl"] == "nan"


def test_a_failure_of_the_disk_is_the_logs(tmp_path):
    log = Log()
    kept(tmp_path / "gone", 1, log=log)
    assert isinstance(log.failure, OSError)
    assert FILE in str(log.failure)
