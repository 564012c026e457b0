"""Results of steps that are read once the next step is queued: the same, only later."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.supervised.loop import in_turn
from helpers.spread import ALL


def steps_read(count, *, due=(), asked_at=(), fails_at=None, end_is_known=True):
    """What happens in turn: a step is queued, or read; "last" where none is queued behind it."""
    events = []

    def reading(step):
        def read():
            events.append(f"read {step}")
            return SimpleNamespace(step=step, requests=[0.0, float(step in asked_at)])

        return read

    def queued():
        for step in range(1, count + 1):
            if step == fails_at:
                raise ValueError("no more data")
            events.append(f"queue {step}")
            yield reading(step)

    done = 0

    def is_due(ahead):
        return done + ahead in due or (end_is_known and done + ahead == count)

    error = ""
    try:
        for result, newest in in_turn(queued(), is_due):
            done += 1
            assert result.step == done
            events[-1] += " last" if newest else ""
    except ValueError as raised:
        error = str(raised)
    return " ".join(events), error


def test_a_step_is_read_when_the_next_is_queued_and_the_last_at_once():
    for known in (True, False):
        events, _ = steps_read(3, end_is_known=known)
        assert events == "queue 1 queue 2 read 1 queue 3 read 2 read 3 last"


def test_a_step_after_which_something_is_due_is_read_before_another_is_queued():
    events, _ = steps_read(4, due={2})
    assert events == "queue 1 queue 2 read 1 read 2 last queue 3 queue 4 read 3 read 4 last"


def test_a_step_that_was_queued_behind_a_request_is_read_at_once():
    events, _ = steps_read(4, asked_at={1})
    assert events.startswith("queue 1 queue 2 read 1 read 2 last queue 3 queue 4")


def test_steps_that_were_made_before_an_error_are_read_before_it_is_raised():
    assert steps_read(4, fails_at=3) == ("queue 1 queue 2 read 1 read 2", "no more data")


def comparable(lines):
    """Lines of metrics without what depends on time."""
    timed = {"time", "step_seconds", "peak_memory_bytes", "mfu"}
    return [
        {k: v for k, v in line.items() if k not in timed and "_per_" not in k and "tflops" not in k}
        for line in lines
    ]


@pytest.fixture
def both(ranks, model_directory):
    """``both(...)``: a run of one process that reads results in time, and one that reads late."""

    def call(**options):
        options |= {"path": model_directory("opt"), "lates": [False, True]}
        ((in_time, late),) = ranks(1).run("helpers.runs:fit_reading_late", **options)
        return in_time, late

    return call


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for step, tensors in theirs.items():
        for name, tensor in tensors.items():
            assert torch.equal(ours[step][name], tensor), (step, name)


@pytest.mark.stage
@pytest.mark.parametrize("size", [1, *[2] * ALL])
def test_lines_evaluations_and_checkpoints_are_those_of_results_read_in_time(
    ranks, model_directory, size
):
    options = {"path": model_directory("opt"), "infinite": [[1, 0, 0], [3, 1, 0], [4, 1, 0]]}
    results = ranks(size).run("helpers.runs:fit_reading_late", lates=[False, True], **options)
    for in_time, late in results:
        assert late["error"] == in_time["error"] == ""
        assert comparable(late["lines"]) == comparable(in_time["lines"])
        assert late["progress"] == in_time["progress"]
        assert [*late["evaluated"]] == [0, 3, 6, 9]
        assert_same(late["evaluated"], in_time["evaluated"])
        assert [*late["saved"]] == [4, 8]
        assert_same(late["saved"], in_time["saved"])
    lines = results[0][1]["lines"]
    events = [line["step"] for line in lines if line["kind"] == "event"]
    assert events == [2, 4, 5]


@pytest.mark.stage
def test_a_loss_scale_falls_before_the_step_after_an_overflow(both):
    in_time, late = both(infinite=[[1, 0, 0], [4, 1, 0]], dtype="fp16")
    assert comparable(late["lines"]) == comparable(in_time["lines"])
    assert_same(late["evaluated"], in_time["evaluated"])
    steps = [line for line in late["lines"] if line["kind"] == "train"]
    scales = [line["loss_scale"] for line in steps]
    # The first overflow is forgiven.
    assert scales == [scales[0]] * 5 + [scales[0] / 2] * 4


@pytest.mark.stage
def test_a_request_is_fulfilled_a_step_late_with_the_weights_of_that_step(both):
    in_time, late = both(infinite=[], asked_at=5)
    assert [*in_time["saved"]] == [4, 5, 8]
    assert [*late["saved"]] == [4, 6, 8]
    assert_same({6: late["saved"][6]}, {6: in_time["evaluated"][6]})


@pytest.mark.stage
def test_a_run_that_fails_has_the_lines_of_all_steps_before(both):
    in_time, late = both(infinite=[], fails_at=6)
    assert late["error"] == in_time["error"] == "the step failed"
    assert late["progress"]["step"] == 5
    assert comparable(late["lines"]) == comparable(in_time["lines"])


@pytest.mark.stage
def test_a_run_is_given_up_a_step_later(both):
    in_time, late = both(infinite=[[n, 0, 0] for n in (4, 5, 6)])
    assert late["error"] == in_time["error"]
    assert "training stopped at step 7: the gradient was not finite 3 times" in late["error"]
    assert comparable(late["lines"]) == comparable(in_time["lines"])
