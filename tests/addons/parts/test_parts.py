"""Parts of an iteration that are the user's own: metrics, a state and files."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.addons.parts.parts import PartError, RunOfPart, UserPart, check_twins
from dschat_lora.config.held import held
from dschat_lora.rl.loop.parts import Parts

pytestmark = pytest.mark.usefixtures("one_rank")
EXPERIENCE = SimpleNamespace(scores=torch.tensor([1.0, 2.0]))


class Counting:
    """Counts iterations, in a file too."""

    def begin(self, run):
        self.count, self.file = 0, run.appended("counts.csv", head="count,score\n")

    def after_iteration(self, experience, targets):
        self.count += 1
        self.file.append(f"{self.count},{float(experience.scores.sum())}\n")
        return {"count": self.count}

    def state(self):
        return self.count

    def restore(self, state):
        self.count = state


class Failing:
    def after_iteration(self, experience, targets):
        raise KeyError("mine")


class Log:
    failure = None

    def say(self, text):
        self.said = text


def user_part(part, directory):
    run = RunOfPart(directory, None, SimpleNamespace(iteration=0), Log())
    with held(part, "part") as name:
        return UserPart(name, run)


def iterate(part, times):
    parts = Parts([part])
    return [parts.after_iteration(EXPERIENCE, None) for _ in range(times)]


@pytest.mark.smoke
def test_a_class_is_made_an_object_whose_metrics_are_the_iterations(tmp_path):
    assert iterate(user_part(Counting, tmp_path), 2) == [{"count": 1.0}, {"count": 2.0}]


def test_state_and_file_of_a_part_are_those_of_the_checkpoint_again(tmp_path):
    part = user_part(Counting, tmp_path)
    iterate(part, 2)
    state = part.state()
    iterate(part, 3)
    again = user_part(Counting, tmp_path)
    again.restore(state)
    assert iterate(again, 1) == [{"count": 3.0}]
    assert (tmp_path / "counts.csv").read_text() == "count,score\n1,3.0\n2,3.0\n3,3.0\n"


def test_what_fails_ends_the_run_once_the_others_have_had_the_iteration(tmp_path):
    counting, failing = user_part(Counting, tmp_path), user_part(Failing, tmp_path)
    parts = Parts([failing, counting])
    assert parts.after_iteration(EXPERIENCE, None) == {"count": 1.0}
    with pytest.raises(PartError) as caught:
        parts.check()
    assert str(caught.value).startswith("--parts python:part: after_iteration failed: KeyError")


def test_something_without_a_method_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--parts python:part must have after_iteration"):
        user_part(SimpleNamespace(), tmp_path)


def test_what_comes_first_in_a_file_is_its_head_and_not_appended_before_a_run_is_restored(tmp_path):
    class Early(Counting):
        def begin(self, run):
            run.appended("early.csv").append("count\n")

    with pytest.raises(ValueError, match=r"give what comes first as run.appended\('early.csv', h"):
        user_part(Early, tmp_path)


def test_two_parts_of_one_name_are_refused_as_checkpoints_keep_them_by_it(tmp_path):
    twins = [user_part(Counting, tmp_path / name) for name in "ab"]
    with pytest.raises(ValueError, match=r"--parts names Counting twice"):
        check_twins(twins)
