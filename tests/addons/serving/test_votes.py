"""Votes as rows that step 2 reads."""

import json
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from dschat_lora.addons.serving.config import ServeConfig
from dschat_lora.addons.serving.verbs import votes_path
from dschat_lora.addons.serving.votes import VoteFile
from dschat_lora.data.readers import iter_file
from dschat_lora.data.rows import parse_row, require_usable
from helpers.links import KINDS, check_links_within_are_followed, check_no_link_is_followed

PROMPT = [{"role": "user", "content": "Name a fruit."}]


def vote(chosen="A pear.", *others):
    return {
        "prompt": PROMPT,
        "chosen": {"model": "sft", "content": chosen},
        "rejected": [{"model": f"m{i}", "content": text} for i, text in enumerate(others)],
    }


@pytest.mark.smoke
def test_a_vote_is_a_preference_over_each_other_answer_that_step_2_reads(tmp_path):
    file = VoteFile(tmp_path / "new" / "votes.jsonl")
    assert file.append(vote("A pear.", "A car.", "A pear. ", "", "Caf\u00e9.")) == 2
    rows = [require_usable(parse_row(raw), "pairs") for raw in iter_file(file.path)]
    assert [row.kind for row in rows] == ["preference"] * 2
    assert [row.values["prompt"] for row in rows] == [PROMPT] * 2
    assert [row.values["chosen"] for row in rows] == [
        [{"role": "assistant", "content": "A pear."}]
    ] * 2
    assert [row.values["rejected"][0]["content"] for row in rows] == ["A car.", "Caf\u00e9."]
    assert [row.values["rejected_model"] for row in rows] == ["m0", "m3"]


def test_earlier_votes_stay_also_behind_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "votes.jsonl"
    path.write_text('{"prompt": "a", "chosen"')
    VoteFile(path).append(vote("A pear.", "A car."))
    VoteFile(path).append(vote("An apple.", "A bus."))
    first, *lines = path.read_text().splitlines()
    assert first == '{"prompt": "a", "chosen"'
    assert [json.loads(line)["chosen"][0]["content"] for line in lines] == ["A pear.", "An apple."]


def test_vote_that_the_disk_takes_a_part_of_leaves_the_file_as_it_was(tmp_path):
    file = VoteFile(tmp_path / "votes.jsonl")
    file.append(vote("A pear.", "A car."))
    before = file.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            file.append(vote("An apple.", "A bus."))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.path.read_bytes() == before
    assert file.append(vote("An apple.", "A bus.")) == 1
    assert len([json.loads(line) for line in file.path.read_text().splitlines()]) == 2


def test_votes_at_one_time_do_not_mix(tmp_path):
    file = VoteFile(tmp_path / "votes.jsonl")
    long = "<b>\u2028\x00\r\n\"'</script>" * 1000
    bodies = [vote(f"{number} {long}", "x", "y") for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert [*pool.map(file.append, bodies)] == [2] * 16
    rows = [json.loads(line) for line in file.path.read_text().split("\n")[:-1]]
    said = sorted(int(row["chosen"][0]["content"].split()[0]) for row in rows)
    assert said == sorted([*range(16)] * 2)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def append(out):
    VoteFile(out / "votes.jsonl").append(vote("x", "y"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_vote_is_written_through_a_link_out_of_the_directory(out, kind):
    check_no_link_is_followed(out, append, "votes.jsonl", kind)


def test_links_within_the_directory_are_followed(out):
    check_links_within_are_followed(out, append)


def test_the_line_names_file_and_target(out):
    (out / "votes.jsonl").symlink_to("/etc/hosts")
    words = rf"{out}/votes.jsonl is a link to /etc/hosts; files written to {out} must stay there"
    with pytest.raises(ValueError, match=words):
        votes_path(ServeConfig(models=(str(out),)))
    # The user's own word is followed.
    (out / "own.jsonl").symlink_to("../votes.jsonl")
    named = ServeConfig(models=(str(out),), votes=str(out / "own.jsonl"))
    assert votes_path(named) == out.parent / "votes.jsonl"
